"""Compilation of network, strategy and batch to the program of a step, for one rank. Pure arithmetic, local.

The compiler inserts redistributions between layers, chooses the values that get margins so that halos are received in
place, and orders the backward pass. Every layer lowers itself (:meth:`Layer.lower <halograd.layers.Layer.lower>`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..device import is_low, wide
from ..dtensor import Blocks
from ..kernels.access import reads, writes
from ..layers import Input, Network, Node, Redistribute
from ..layers.parameter import ParameterBlocks, blocks_of
from ..layers.strategy import Cut, Strategy, counts_of, layout_of, parameter_blocks
from ..lowering.context import Context, Lowered
from ..lowering.operations import KernelSpec, Operation, Run, Timing
from ..lowering.views import Buffer, Value, View
from .passes import apply_passes
from .program import Program, Segment, Step, Target
from .recompute import exchanges, exchanges_again, recompute
from .widening import hide_sums, widen

__all__ = ["Alone", "compile_program", "lower_program", "outline"]


#: Layer object of all redistributions.
_MOVED = Redistribute()


def compile_program(
    network: Network,
    strategy: Strategy,
    target: Target,
    blocks: Mapping[str, ParameterBlocks] | None = None,
    replicable: Collection[str] = (),
) -> Program:
    """Compile the program of a step of `network` under `strategy`. Local.

    Parameters
    ----------
    blocks
        Blocks of parameters and states, if already known.
    replicable
        Names of dense layers that may compute the gradient of the whole batch on every rank.
    """
    program = lower_program(network, strategy, target, blocks, replicable)
    if target.size == 1 or not target.trainable or not any(map(exchanges, program.steps)):
        return recompute(program)
    first = program  # of rank 0, which determines the exchanges that all ranks repeat
    if target.rank:
        first = lower_program(network, strategy, replace(target, rank=0), blocks, replicable)
    return recompute(program, exchanges_again(first))


def lower_program(
    network: Network,
    strategy: Strategy,
    target: Target,
    blocks: Mapping[str, ParameterBlocks] | None = None,
    replicable: Collection[str] = (),
) -> Program:
    """Compile a program without recomputation. Local. The parameters are those of `compile_program`."""
    compiler = _Compiler(network, strategy, target, replicable)
    compiler.lower(blocks or parameter_blocks(network, strategy, target.size))
    return apply_passes(hide_sums(compiler.program), strategy.passes)


def outline(network: Network, strategy: Strategy, target: Target) -> Program:
    """Return the program of a step without its operations: layers in order, redistributions among them, and values.

    Only inputs have storage. Local.
    """
    compiler = _Compiler(network, strategy, target)
    compiler.choose_storage(compiler.program.inputs.values())
    program = compiler.program
    program.forward = [Segment(step.name) for step in program.steps]
    program.backward = [Segment(step.name) for step in reversed(program.steps)]
    return program


class _Compiler:
    def __init__(self, network: Network, strategy: Strategy, target: Target, replicable: Collection[str] = ()) -> None:
        self.network, self.strategy, self.target = network, strategy, target
        self.replicable = frozenset(replicable)
        self.program = Program(network.name, target)
        self._values: dict[tuple[Node, tuple[Cut, ...]], Value] = {}
        self._cuts: dict[Node, tuple[Cut, ...]] = {}
        self._moves: dict[Value, list[Step]] = {}
        self._reread: set[Buffer] = set()
        self._contexts: dict[str, tuple[Context, Lowered]] = {}
        self._calls: dict[str, list[Step]] = {}  # later calls of layers that are called several times
        outputs = {network.names[node] for node in network.outputs.values()}
        self._kept = target.kept | outputs
        #: Inputs of the network in the wide dtype: targets, and those that only layers with `exact_inputs` read.
        read = {i: [n for n in network.nodes if i in n.inputs] for i in network.nodes if isinstance(i, Input)}
        self._exact = {
            i
            for i, readers in read.items()
            if readers and all(n.layer.exact_inputs or n.layer.compares(n.inputs.index(i)) for n in readers)
        }
        for node in network.nodes:
            self.add(node)
        # Before values get storage, which depends on the boxes that ranks hold.
        widen(self.program.steps)

    # -- values and steps ----------------------------------------------------------------------

    def add(self, node: Node) -> None:
        if isinstance(node, Input):
            return  # placed when its first reader is known
        name = self.network.names[node]
        cuts = self.strategy.cuts_of(name)
        inputs = [self._read(n, cuts) for n in node.inputs]
        if any(value.trainable and node.layer.compares(i) for i, value in enumerate(inputs)):
            raise ValueError(
                f"{name}: expected a target that depends on no probed input, got one that does; a loss has no gradient "
                "with respect to its target: make it an Input of its own, or leave that input out of probed"
            )
        for value in inputs if node.layer.keeps_inputs else ():
            value.kept = True  # the value that the layer reads may be a copy under another cut
        output = self._value(name, node.shape, cuts, self.target.dtype)
        output.kept = name in self._kept
        owner = self.network.owners[name]
        frozen = owner in self.network.frozen
        self._cuts[node] = key = tuple(cuts.values())
        self._values[node, key] = self.program.values[name] = output
        options = self.strategy.options_of(name)
        if self.target.trainable and name in self.replicable:
            options = {**options, "weight_gradient": "replicated"}
        parts = self.strategy.parts_of(name)
        step = Step(name, node.layer, inputs, output, options, parts, owner if owner != name else "", frozen)
        if not step.owner:  # all programs of a network share the descriptions
            vars(step).update(parameters=self.network.own_parameters(name), states=self.network.own_states(name))
        # The gradient of the output leads to parameters of this layer, or to those of earlier ones.
        output.trainable = (bool(step.parameters) and not frozen) or any(v.trainable for v in inputs)
        self.program.steps.append(step)
        if step.owner:
            self._calls.setdefault(step.owner, []).append(step)

    def _value(self, name: str, shape: Sequence[int], cuts: Mapping[str, Cut], dtype: np.dtype) -> Value:
        layout = layout_of((self.target.batch, *shape), cuts, self.target.size)
        return Value(name, layout, dtype, self.target.rank)

    def _read(self, node: Node, cuts: Mapping[str, Cut]) -> Value:
        """Return the value of `node` under `cuts`; add a redistribution if its layer has other cuts."""
        key = tuple(cuts.values())
        if (node, key) in self._values:
            return self._values[node, key]
        name = self.network.names[node]
        # An input has the cuts of its first reader.
        if isinstance(node, Input) and node not in self._cuts:
            self._cuts[node] = key
            dtype = wide(self.target.dtype) if node in self._exact else self.target.dtype
            value = self._value(name, node.shape, cuts, node.array_dtype(dtype))
            value.trainable, value.read = name in self.target.probed, True
            self._values[node, key] = self.program.values[name] = self.program.inputs[name] = value
            return value
        source = self._values[node, self._cuts[node]]
        # Other cuts may give the same boxes, for example of axes of extent 1: nothing has to move.
        if layout_of(source.layout.shape, cuts, self.target.size) == source.layout:
            return source
        label = f"{name}->{','.join(f'{axis}={n}' for axis, n in cuts.items() if n != 1) or 'one rank'}"
        value = self._value(label, node.shape, cuts, source.dtype)
        value.trainable = source.trainable
        # Readers with the same cut share one redistribution.
        self._values[node, key] = value
        step = Step(label, _MOVED, [source], value, {}, counts_of(cuts))
        self.program.steps.append(step)
        self._moves.setdefault(source, []).append(step)
        return value

    def choose_storage(self, values: Collection[Value]) -> None:
        """Choose the storage of values with margins for halos: of inputs always, of others if views stay packed."""
        needs: dict[Value, list[Blocks]] = {value: [] for value in values}
        for step in self.program.steps:
            layouts, output = [v.layout for v in step.inputs], step.output.layout_of(step.output.held)
            for i, value in enumerate(step.inputs):
                if value in needs:
                    blocks = step.layer.needed_blocks(i, layouts, output)
                    needs[value].append(blocks.clipped(value.layout.shape))
        for value, needed in needs.items():
            value.choose_storage(needed)

    def choose_all_storage(self) -> None:
        """Choose the storage of all values and of their gradients."""
        inputs = self.program.inputs.values()
        # Before the choice of storage, which depends on the number of channels in memory.
        for value in inputs:
            self._pad(value)
        self.choose_storage([*inputs, *(step.output for step in self.program.steps)])
        for step in self.program.steps:
            x = step.inputs[0]
            blocks = step.layer.gradient_blocks(x.layout_of(x.held_gradient), step.output.layout)
            if blocks is not None:
                step.output.choose_gradient_storage(blocks[self.target.rank])

    def _pad(self, value: Value) -> None:
        """Pad the channels of an input as the kernels require, if all layers that read the input allow it."""
        readers = [step for step in self.program.steps if value in step.inputs]
        padded = all(step.layer.takes_padded_channels for step in readers)
        if padded and is_low(value.dtype) and self.target.padded_channels is not None:
            value.stored_channels = self.target.padded_channels(value.layout.shape[-1], value.dtype)

    # -- operations ----------------------------------------------------------------------------

    def lower(self, blocks: Mapping[str, ParameterBlocks]) -> None:
        self.blocks = blocks
        self.choose_all_storage()
        for value in self.program.inputs.values():
            self._launch(value)
        for step in self.program.steps:
            # A redistribution was lowered where it starts (`_launch`); here it finishes.
            operations = self._finish(step) if step.name in self._contexts else self._lower(step)
            self.program.forward.append(Segment(step.name, operations))
            self._launch(step.output)
        if self.target.trainable:
            self._lower_backward()
        for name in sorted(self.target.probed):
            value = self.program.values[name]
            # An input has no layer whose backward pass would finish its gradient.
            self._close(name, value)
            if value.gradient is not None:
                # It is read after the step.
                value.gradient.view.buffer.kept = True

    def _context(self, step: Step) -> Context:
        target = self.target
        options = {"trainable": target.trainable, "overlaps": target.overlaps, "looks": target.looks}
        return Context(step, self._arrays(step), **options, reread=self._reread)

    def _arrays(self, step: Step) -> dict[str, dict[str, View]]:
        blocks = {key: self.blocks[f"{step.arrays_of}/{key}"] for key in (*step.parameters, *step.states)}
        return _arrays(step, blocks, self.target.rounds)

    def _lower(self, step: Step) -> list[Operation]:
        context = self._context(step)
        lowered = _lowered(step, context)
        self._contexts[step.name] = context, lowered
        if lowered.loss is not None and step.name == self._loss_name:
            self.program.loss, self.program.terms = lowered.loss, list(lowered.terms)
        if lowered.exposed is not None:
            self.program.exposed[step.name] = lowered.exposed
        return context.take()

    @property
    def _loss_name(self) -> str | None:
        node = self.network.outputs.get("loss")
        return None if node is None else self.network.names[node]

    def _launch(self, value: Value) -> None:
        """Add the forward operations of a value's redistributions, which start as soon as the value is computed."""
        for step in self._moves.get(value, ()):
            self.program.forward.append(Segment(step.name, self._lower(step)))

    def _finish(self, step: Step) -> list[Operation]:
        context, lowered = self._contexts[step.name]
        if lowered.finish is not None:
            lowered.finish()
        return context.take()

    def _lower_backward(self) -> None:
        for step in reversed(self.program.steps):
            value = step.output
            is_loss = step.name == self._loss_name and self.program.loss is not None
            # Without contributions, the loss does not depend on the value.
            if not value.trainable or not (value.contributions or is_loss):
                continue
            self._close(step.name, value)
            context, lowered = self._contexts[step.name]
            if lowered.backward is not None:
                lowered.backward()
            self._add_calls(step, context)
            operations = context.take()
            self.program.backward.append(Segment(step.name, operations))
            # Earlier layers may read these arrays instead of their outputs (`Context.y_again`).
            self._reread.update(*(operation.buffers() for operation in operations))

    def _add_calls(self, step: Step, context: Context) -> None:
        """Add up the gradients of all calls of a layer, after the backward of the first call, which runs last."""
        calls = self._calls.get(step.name, ())
        if not calls or step.frozen:
            return
        for key, total in context.grads.items():
            others = [self._contexts[call.name][0].grads[key] for call in calls]
            views = {f"x{i}": view for i, view in enumerate((total, *others))}
            context.run(context.kernel(_adding, **views, total=total))

    def _close(self, name: str, value: Value) -> None:
        """Finish the gradient of a value: wait for redistributed gradients, and sum several contributions."""
        for step in self._moves.get(value, ()):
            context, lowered = self._contexts[step.name]
            if lowered.finish_backward is not None:
                lowered.finish_backward()
            operations = context.take()
            if operations:
                self.program.backward.append(Segment(f"{name} (moved)", operations))
        value.close_gradient(lambda summands, total: self._add(f"{name} (sum)", value, summands, total))

    def _add(self, name: str, value: Value, summands: list[View], total: View) -> None:
        views = {f"x{i}": view for i, view in enumerate(summands)}
        timing = Timing("sum", (value.held_gradient.longest,) * len(summands))
        run = Run(name, KernelSpec(_adding, {**views, "total": total}), timing=timing)
        self.program.backward.append(Segment(name, [run]))


def _arrays(step: Step, blocks: Mapping[str, ParameterBlocks], rounds: bool = True) -> dict[str, dict[str, View]]:
    """Return views of the arrays in the store that belong to a layer, by kind (``"params"``, ``"grads"``, ``"state"``)
    and short name.

    Gradients of a frozen layer, and of a layer that uses another layer's parameters, are scratch.
    """
    dtype, rank = step.output.dtype, step.output.rank
    half, full = is_low(dtype), wide(dtype)
    # Parameters are float32; kernels of 16 bits read copies that are rounded to 16 bits.
    low = half and not step.layer.exact_parameters
    views: dict[str, dict[str, View]] = {"params": {}, "grads": {}, "state": {}}
    for key, held in blocks.items():
        name, shape = f"{step.arrays_of}/{key}", held.boxes[rank].shape
        if key in step.states:
            views["state"][key] = Buffer(shape, full, "parameter", location=("state", name)).view
            continue
        location = ("copies", name) if low else ("params", name)
        views["params"][key] = Buffer(shape, dtype if low else full, "parameter", location=location).view
        rounded = half and rounds and step.parameters[key].rounded
        kind, gradient_dtype = ("rounded", dtype) if rounded else ("grads", full)
        own = Buffer(shape, gradient_dtype, "parameter gradient", location=(kind, name))
        views["grads"][key] = (Buffer(shape, gradient_dtype, "transient") if step.frozen or step.owner else own).view
    return views


def _lowered(step: Step, context: Context) -> Lowered:
    """Lower a layer; return its :class:`Lowered`. Raises TypeError if the layer returns something else."""
    lowered = step.layer.lower(context)
    if not isinstance(lowered, Lowered):
        raise TypeError(
            f"layer {step.name!r}: {step.layer.kind}.lower(): expected a Lowered, got {type(lowered).__name__}; "
            "return Lowered(backward) with the function that adds the backward pass, or Lowered() without one"
        )
    return lowered


class Alone:
    """One layer with one cut, lowered without other layers. Local; the values need no storage yet.

    Parameters
    ----------
    step
        The layer, with values that no other layer uses.
    trainable
        Whether there is a backward pass.
    overlaps
        Whether ``halo = "auto"`` computes while halos travel.
    gathered
        Per input, the boxes that earlier layers have gathered: keys of `Value.gathered`.

    Attributes
    ----------
    forward
        Operations of the forward pass.
    lowered
        Result of :meth:`Layer.lower <halograd.layers.Layer.lower>`.
    """

    def __init__(
        self, step: Step, trainable: bool, overlaps: bool = False, gathered: Sequence[Collection[Any]] = ()
    ) -> None:
        specs, output = {**step.parameters, **step.states}, step.output.layout
        blocks = {key: blocks_of(spec, step.parts, output) for key, spec in specs.items()}
        self.step, self.context = step, Context(step, _arrays(step, blocks), trainable=trainable, overlaps=overlaps)
        for i, value in enumerate(step.inputs):
            value.choose_storage([self.context.clipped(i)])
        step.output.choose_storage([])
        self._gather(gathered)
        self.lowered = _lowered(step, self.context)
        if self.lowered.finish is not None:
            self.lowered.finish()
        self.forward = self.context.take()

    def _gather(self, gathered: Sequence[Collection[Any]]) -> None:
        """Gather boxes that other layers have gathered already; this adds no operations."""
        for i, keys in enumerate(gathered):
            for key in keys:
                self.context.gather(i, *key)

    def backward(self, gathered: Sequence[Collection[Any]] = ()) -> list[Operation]:
        """Return the operations of the backward pass. Call it once.

        Parameters
        ----------
        gathered
            As for the constructor, with the boxes of all layers.
        """
        self._gather(gathered)
        if self.lowered.backward is not None:
            if self.lowered.loss is None:
                # It stands for the gradient from a layer that reads the output.
                self.step.output.new_contribution()
                self.step.output.close_gradient(lambda summands, total: None)
            self.lowered.backward()
        if self.lowered.finish_backward is not None:
            self.lowered.finish_backward()
        return self.context.take()


@reads("x*")
@writes("total")
def _adding(environment: Any, total: Any, **summands: Any) -> Callable[[], None]:
    return environment.kernels.add(list(summands.values()), total)
