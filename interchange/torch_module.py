"""Modules of torch as networks: export by one of the two exporters of torch, in memory, and import.

Both exporters write the module in training mode, with its parameters as they are. torch.export traces it without
computing, stores which arrays are buffers, and refuses what it cannot follow. TorchScript's tracer runs the module on
the example; its files contain less of the module, so it is used only where torch.export fails, and not where a file of
torch.export is refused. The module is the same afterwards: modes, buffers, running statistics, random numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import mmap
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import one_line
from halograd.errors import UserError

from ..data.disk import atomic_path
from ..layers import Network
from ..layers.parameter import GivenValues
from .files import Buffer, library
from .graph import FROZEN, KIND, UNMERGED
from .onnx_import import imported
from .own_operators import marked, symbolics, translations
from .weights import arrangements

__all__ = ["EXPORTERS", "ExportedModule", "export", "fill_module", "state_for"]

#: Files with more bytes of weights are written in two parts: a message of Protocol Buffers has at most 2 GiB.
_LARGE = 1 << 30
#: Entry of nodes that names files of this machine, and is not read.
_TRACE = "pkg.torch.onnx.stack_trace"


@dataclass(frozen=True)
class ExportedModule:
    """A module of torch in ONNX files, in memory.

    Attributes
    ----------
    name
        Name of the network: the class of the module.
    contents
        Files by name. The first is the model; large weights are in a second one.
    """

    name: str
    contents: Mapping[str, Buffer]

    def write(self, path: Path) -> None:
        """Write the model to `path`, and large weights next to it; older files are replaced. Local.

        Raises
        ------
        DataError
            If the files cannot be written.
        """
        first = next(iter(self.contents))
        for name, content in reversed(list(self.contents.items())):  # the model last: it is complete if it is there
            with atomic_path(path if name == first else path.with_name(name), len(content)) as partial:
                partial.write_bytes(content)

    def network(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Network:
        """Build the network for samples of these shapes, ``(*spatial, C)``. Local. Raises UserError."""
        return imported(Path(self.name), shapes, None, self.contents)


@dataclass
class _Call:
    """A module with the tensors of one call.

    Attributes
    ----------
    module, tensors
        The module, and its arguments by the names in the signature of ``forward``.
    bound
        The arguments of ``forward``.
    outputs
        Names of the tensors that the module returned when it was traced last.
    """

    module: Any
    tensors: dict[str, Any]
    bound: Any
    outputs: list[str] = dataclasses.field(default_factory=list)

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the call's tensors, in order; it returns the tensors in the result of `original`."""

        def forward(*tensors: Any) -> tuple[Any, ...]:
            named = dict(zip(self.tensors, tensors))
            for key, argument in self.bound.arguments.items():
                if isinstance(argument, tuple):
                    self.bound.arguments[key] = tuple(named[f"{key}_{i}"] for i in range(len(argument)))
                elif isinstance(argument, Mapping):
                    self.bound.arguments[key] = {inner: named[inner] for inner in argument}
                else:
                    self.bound.arguments[key] = named[key]
            results = dict(_tensors(original(*self.bound.args, **self.bound.kwargs), ""))
            self.outputs = [f"{name}_output" if name in self.tensors else name for name in results]
            return tuple(results.values())

        return forward


def export(
    module: Any, example_inputs: Any, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[ExportedModule, Network]:
    """Return a module of torch as ONNX files, and its network. Local.

    The parameters and errors are those of :func:`halograd.from_torch`.
    """
    torch = library("torch", "torch onnxscript")
    library("onnxscript", "'halograd[interchange]' onnxscript")
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"from_torch(): expected a torch.nn.Module, got {type(module).__name__}")
    module = getattr(module, "_orig_mod", module)  # torch.compile wraps a module in another
    call = _call_of(module, example_inputs)
    strange = sorted(set(shapes or ()) - set(call.tensors))
    if strange:
        raise UserError(f"from_torch(): shapes: expected inputs ({', '.join(call.tensors)}), got {strange[0]!r}")
    refused = []
    for title, exporter in EXPORTERS.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                with _traced(call):
                    exporter(call, Path(folder), shapes or {})
                exported = ExportedModule(type(module).__name__, _finished(Path(folder), call))
        except UserError:
            raise
        except Exception as error:  # exporters raise errors of all types
            refused.append(f"by {title}: {_reason(error)}")
        else:
            return exported, exported.network(shapes)
    raise UserError(
        f"from_torch(): {type(module).__name__}: expected a module that torch can export to ONNX, got errors: "
        f"{'; '.join(refused)}"
    )


def _reason(error: BaseException) -> str:
    """Return the first cause of an exporter's error as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {one_line(error)[:300]}"


def _call_of(module: Any, example_inputs: Any) -> _Call:
    """Return the call of a module with a tensor, a sequence of tensors, or a mapping of them by name."""
    import inspect

    torch = library("torch")
    inputs = example_inputs
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    try:
        bound = inspect.signature(module.forward).bind(*args, **(inputs if isinstance(inputs, Mapping) else {}))
    except TypeError as error:
        raise UserError(f"from_torch(): example_inputs: expected arguments of forward(), got others: {error}") from None
    tensors: dict[str, Any] = {}
    # ``*inputs`` of `forward` are bound as one tuple, ``**inputs`` as one mapping.
    for key, value in bound.arguments.items():
        if isinstance(value, Mapping):
            tensors |= value
        else:
            tensors |= {f"{key}_{i}": v for i, v in enumerate(value)} if isinstance(value, tuple) else {key: value}
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or not value.numel():
            raise UserError(
                f"from_torch(): example_inputs: expected tensors (N, C, *spatial), got {_kind(value)} as {key!r}"
            )
    if not tensors:
        raise UserError("from_torch(): example_inputs: expected a tensor, or several, got none")
    return _Call(module, tensors, bound)


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield name and tensor of all tensors in the result of a module."""
    torch = library("torch")
    if isinstance(value, torch.Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}_{key}" if name else f"{key}")
    elif isinstance(value, tuple | list):
        keys = getattr(value, "_fields", None) or [f"{name or 'output'}_{i}" for i in range(len(value))]
        for key, inner in zip(keys, value):
            yield from _tensors(inner, key)
    elif dataclasses.is_dataclass(value):
        yield from _tensors({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, name)
    elif value is not None:
        raise UserError(f"expected a forward() that returns tensors, got {type(value).__name__} as {name or 'output'}")


# -- the module during an export ---------------------------------------------------------------------------


@contextlib.contextmanager
def _traced(call: _Call) -> Iterator[None]:
    """Put a module into training mode, and let it return a plain tuple of tensors; restore all of it afterwards."""
    torch, module = library("torch"), call.module
    modes = {submodule: submodule.training for submodule in module.modules()}
    buffers = {submodule: dict(submodule._buffers) for submodule in module.modules()}
    # torch.export replaces lists by copies, also one that modules share; forward() may write to it.
    containers = [
        (vars(submodule), key, value, value.copy())
        for submodule in module.modules()
        for key, value in vars(submodule).items()
        if type(value) in (list, dict) and key not in vars(torch.nn.Module())  # subclasses may refuse changes
    ]
    # By identity, because modules may share a buffer.
    numbers = {id(b): b.clone() for own in buffers.values() for b in own.values() if b is not None}
    # The traced `forward` hides that of the class; a module may also have one of its own already.
    own = module.__dict__.get("forward")
    original = module.forward
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        # Of a module in training, submodules in evaluation stay so; `_check_modes` refuses norms among them.
        if not module.training:
            module.train()
        _check_modes(module)
        module.forward = call.forward(original)
        with torch.random.fork_rng(devices), _quiet(), marked(), _norms_by_function() as found:
            yield
            if found:
                _check_evaluation(call, found)
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own
        with torch.no_grad():
            for submodule, there in buffers.items():
                submodule._buffers.clear()
                submodule._buffers.update(there)
                for buffer in there.values():
                    if buffer is not None and not torch.equal(buffer, numbers[id(buffer)]):
                        buffer.copy_(numbers[id(buffer)])
        for attributes, key, container, content in containers:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
            attributes[key] = container
        for submodule, mode in modes.items():
            submodule.training = mode


def _check_modes(module: Any) -> None:
    """Raise UserError for a norm with running statistics that halograd would update in another way than torch."""
    torch = library("torch")
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.nn.modules.instancenorm._InstanceNorm) and submodule.track_running_stats:
            raise UserError(
                f"from_torch(): expected instance norms of the statistics of each sample, got {name!r} with "
                "track_running_stats=True; make it without"
            )
        if getattr(submodule, "running_mean", None) is not None and not submodule.training:
            raise UserError(
                f"from_torch(): expected norms in training mode, got {name!r} in evaluation mode; call train() on the "
                "module, and freeze layers in halograd (training.freeze)"
            )
        if getattr(submodule, "running_mean", None) is not None and getattr(submodule, "momentum", 0) is None:
            # torch exports it as momentum 0, which would keep the statistics of the last batch only.
            raise UserError(
                f"from_torch(): expected norms with a momentum, got {name!r} with momentum=None, whose running "
                "statistics are means over all steps; set momentum=0.1"
            )


@contextlib.contextmanager
def _norms_by_function() -> Iterator[list[str]]:
    """Yield a list of the modules (of Python) that call ``batch_norm`` with running statistics and ``training=True``.

    Calls of torch's own modules are not listed: these pass their mode.
    """
    functional, found = library("torch").nn.functional, list[str]()
    original = functional.batch_norm

    def batch_norm(x: Any, mean: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
        training = args[2] if len(args) > 2 else kwargs.get("training", False)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if training and mean is not None and caller != "torch.nn.modules.batchnorm":
            found.append(caller)
        return original(x, mean, var, *args, **kwargs)

    functional.batch_norm = batch_norm
    try:
        yield found
    finally:
        functional.batch_norm = original


def _check_evaluation(call: _Call, found: list[str]) -> None:
    """Raise UserError if ``batch_norm`` takes the statistics of the batch in evaluation, too: our norms do not."""
    found.clear()
    outputs = call.outputs
    call.module.eval()
    with library("torch").no_grad():
        call.module(*call.tensors.values())
    call.outputs = outputs
    if found:
        raise UserError(
            "from_torch(): expected norms that evaluate with running statistics, got batch_norm(..., training=True) in "
            "evaluation mode, too; write training=self.training"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters, whose warnings concern other readers of their files."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        unread = io.StringIO()
        with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


# -- exporters ---------------------------------------------------------------------------------------------


def _by_torch_export(call: _Call, folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write the files by the new exporter, at the requested extents: it traces shapes, and computes nothing."""
    torch = library("torch")
    tensors = [_at(tensor, shapes.get(name)) for name, tensor in call.tensors.items()]
    program = torch.onnx.export(
        call.module,
        tuple(tensors),
        dynamo=True,
        optimize=False,
        input_names=list(call.tensors),
        verbose=False,
        custom_translation_table=translations(),
    )
    for node in program.exported_program.graph.nodes:
        # The exporter leaves this argument out of the file, silently. It is the last one of the operator.
        name = str(node.target).removeprefix("aten.")
        divisor = (*node.args[6:7], node.kwargs.get("divisor_override"))[0]
        if name.startswith(("avg_pool2d.", "avg_pool3d.")) and divisor is not None:
            raise UserError(
                f"from_torch(): expected averages over windows, got divisor_override={divisor} in {node.name!r}; "
                "leave it out, and multiply the averages by a number"
            )
        # The exporter multiplies positive numbers by this argument, too; torch multiplies only the others.
        factor = (*node.args[3:4], node.kwargs.get("input_scale", 1))[0]
        if name.startswith("elu.") and factor != 1:
            raise UserError(
                f"from_torch(): expected elu() with a factor alpha, got input_scale={factor} in {node.name!r}; write "
                "it as celu()"
            )
    large = sum(p.numel() * p.element_size() for p in call.module.parameters()) > _LARGE
    program.save(str(folder / "model.onnx"), external_data=large)


def _by_torchscript(call: _Call, folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write the file by the old exporter, which runs the example; other extents are left open in it."""
    torch = library("torch")
    names = list(call.tensors)
    axes = {
        name: {axis: f"{name}_{axis}" for axis in range(2, tensor.ndim)}
        for name, tensor in call.tensors.items()
        if name in shapes and tuple(shapes[name]) != (*tensor.shape[2:], tensor.shape[1])
    }
    with _written({"aten::detach": _refuse_detach} | symbolics()):
        torch.onnx.export(
            call.module,
            tuple(_at(tensor, None) for tensor in call.tensors.values()),
            str(folder / "model.onnx"),
            dynamo=False,
            opset_version=_OPSET,
            training=torch.onnx.TrainingMode.PRESERVE,  # `_traced` has set the mode
            do_constant_folding=False,  # a folded result has no name of a parameter
            input_names=names,
            dynamic_axes=axes or None,
        )


#: Version of the operators that the old exporter writes.
_OPSET = 18


@contextlib.contextmanager
def _written(symbolics: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Register functions that write operators of torch for the old exporter; unregister them at the end."""
    torch = library("torch")
    try:
        for name, write in symbolics.items():
            torch.onnx.register_custom_op_symbolic(name, write, _OPSET)
        yield
    finally:
        for name in symbolics:
            torch.onnx.unregister_custom_op_symbolic(name, _OPSET)


def _refuse_detach(graph: Any, value: Any) -> Any:
    """Raise an error for ``detach()``, which the old exporter would leave out of the file."""
    raise UserError(
        "from_torch(): expected gradients of all values, got detach() in forward(); detach no value that is trained"
    )


#: Exporters of torch by their name in messages, in the order in which they are tried.
EXPORTERS: dict[str, Callable[[_Call, Path, Mapping[str, Sequence[int]]], None]] = {
    "torch.export": _by_torch_export,
    "TorchScript": _by_torchscript,
}


def _at(tensor: Any, shape: Sequence[int] | None) -> Any:
    """Return an example of two samples or more, of a shape ``(*spatial, C)`` if one is given.

    With one sample, exporters and readers take the sample axis for one of extent 1.
    """
    tensor = tensor.detach()
    if shape is not None and tuple(shape) != (*tensor.shape[2:], tensor.shape[1]):
        return tensor.new_ones((max(2, len(tensor)), shape[-1], *shape[:-1]))
    return tensor if len(tensor) > 1 else tensor.expand(2, *tensor.shape[1:]).clone()


# -- files -------------------------------------------------------------------------------------------------


def _finished(folder: Path, call: _Call) -> dict[str, Buffer]:
    """Return the files of an export: outputs named as the module's, each weight by its first name, with its kind."""
    onnx = library("onnx")
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    graph = model.graph
    _rename(graph, _first_names(call.module, graph))
    outputs = {value.name for value in graph.output}
    # A value within the graph may have the name that an output gets.
    _rename(graph, {n: f"inner {n}" for n in _values(graph) if n in call.outputs and n not in outputs})
    for name, output in zip(call.outputs, list(graph.output)):
        if name != output.name:
            graph.node.append(onnx.helper.make_node("Identity", [output.name], [name], f"output {name}"))
            output.name = name
    for node in graph.node:
        kept = [entry for entry in node.metadata_props if entry.key != _TRACE]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    # In training mode no exporter merges equal arrays, so one that two modules read is one parameter of both.
    model.metadata_props.add(key=UNMERGED, value="True")
    _store_buffers(graph, dict(call.module.named_buffers()))
    _store_frozen(graph, {name for name, parameter in call.module.named_parameters() if not parameter.requires_grad})
    # Equal models have equal bytes: their checksum is a part of the network's source.
    contents: dict[str, Buffer] = {type(call.module).__name__: model.SerializeToString(deterministic=True)}
    for path in sorted(folder.iterdir()):
        if path.name != "model.onnx":
            with open(path, "rb") as file:  # the mapping outlives the file's name
                contents[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return contents


def _first_names(module: Any, graph: Any) -> dict[str, str]:
    """Return the module's first name of each weight that the graph has under another name, by this name."""
    first: dict[int, str] = {}
    both = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {name: first.setdefault(id(tensor), name) for name, tensor in both}
    there = {tensor.name for tensor in graph.initializer}
    return {name: first_name for name, first_name in names.items() if name in there and first_name not in there}


def _values(graph: Any) -> set[str]:
    return {name for node in graph.node for name in (*node.input, *node.output)}


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename values of a graph."""
    if not names:
        return
    for value in (*graph.initializer, *graph.value_info, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for ends in (node.input, node.output):
            ends[:] = [names.get(name, name) for name in ends]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, names)


def _store_buffers(graph: Any, buffers: Mapping[str, Any]) -> None:
    """Store which weights are buffers, as the new exporter does, in a file of the old one, with their present values.

    The old exporter runs the module, so the file has running statistics that include the example.
    """
    onnx = library("onnx")
    known = {info.name for info in graph.value_info}
    for tensor in graph.initializer:
        if tensor.name in known:
            continue
        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        info.metadata_props.add(key=KIND, value="BUFFER" if tensor.name in buffers else "PARAMETER")
        graph.value_info.append(info)
        if tensor.name in buffers:
            tensor.CopyFrom(onnx.numpy_helper.from_array(buffers[tensor.name].cpu().numpy(), tensor.name))


def _store_frozen(graph: Any, names: Collection[str]) -> None:
    """Store which parameters torch does not train."""
    for info in graph.value_info:
        if info.name in names:
            info.metadata_props.add(key=FROZEN, value="True")


# -- back to torch -----------------------------------------------------------------------------------------


def state_for(network: Network, arrays: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the arrays of a network by their names in torch: numbers, and a mask of the elements that the network has.
    Local.

    Parameters
    ----------
    arrays
        Whole arrays of all parameters and states, by ``layer/name``.

    Raises
    ------
    UserError
        An array is missing, or two layers trained one array of torch differently.
    """
    specs = {**network.parameters(), **network.state()}
    missing = sorted(set(specs) - set(arrays))
    if missing:
        raise UserError(f"parameters of network {network.name!r}: expected {missing[0]}, got none; give all of them")
    foreign = {
        name: spec.init.foreign
        for name, spec in specs.items()
        if isinstance(spec.init, GivenValues) and spec.init.foreign is not None
    }
    state: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if len(foreign) < len(specs):
        # Layers with arrays of torch are left out here: the positions of their elements are used below.
        fresh = {name.rpartition("/")[0] for name in foreign}
        for name, arrangement in arrangements(network, fresh).items():
            array = np.asarray(arrays[name])
            # Queries, keys and values of vision transformers are parts of one array.
            whole, _ = state.setdefault(
                arrangement.names[0],
                (np.empty(arrangement.torch_shape, array.dtype), np.ones(arrangement.torch_shape, bool)),
            )
            arrangement.fill(whole, array)
    for name, source in foreign.items():
        numbers, positions = np.asarray(arrays[name]).reshape(-1), source.positions().reshape(-1)
        empty = np.zeros(source.shape, numbers.dtype), np.zeros(source.shape, bool)
        whole, filled = state.setdefault(source.name, empty)
        flat, there = whole.reshape(-1), filled.reshape(-1)
        # Elements that another layer has given already: layers that share an array must agree.
        before = there[positions]
        if not np.array_equal(flat[positions][before], numbers[before]):
            raise UserError(
                f"to_torch(): {name}: expected the numbers of {source.name!r} in all layers that use it, got others"
            )
        flat[positions], there[positions] = numbers, True
    return state


def fill_module(module: Any, state: Mapping[str, tuple[np.ndarray, np.ndarray]], strict: bool = True) -> None:
    """Put arrays under torch's names into a module. Local. Raises UserError, before anything is changed.

    Counters of norms and other buffers that no network changes stay as they are. With `strict`, every parameter and
    every running statistic of the module must be among the arrays.
    """
    torch = library("torch", "torch")
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"to_torch(): expected a torch.nn.Module, got {type(module).__name__}")
    tensors = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    by_tensor = {id(tensors[name]): name for name in state if name in tensors}
    strange = [name for name in state if name not in tensors]
    if strange:
        raise UserError(_unmatched("parameters of the run that the module has", strange, tensors))
    trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    left = [
        name
        for name, tensor in tensors.items()
        if id(tensor) not in by_tensor and (name in trained or name.endswith(("running_mean", "running_var")))
    ]
    if left and strict:
        raise UserError(
            _unmatched("a run with all parameters of the module", left, state)
            + "; if forward() or the loss does not use them, pass strict=False"
        )
    # Every name of a shared tensor gets the array, as load_state_dict() copies name by name.
    new = {}
    for name, tensor in tensors.items():
        if id(tensor) not in by_tensor:
            continue
        array, there = state[by_tensor[id(tensor)]]
        if array.shape != tuple(tensor.shape):
            raise UserError(f"to_torch(): {name}: expected shape {tuple(tensor.shape)}, got {array.shape} in the run")
        # Elements that the network lacks, such as rows that an index leaves out, keep the module's numbers. NumPy lacks
        # some types of torch.
        new[name] = torch.from_numpy(np.where(there, array, tensor.detach().cpu().double().numpy()))
    module.load_state_dict({**{name: t.detach() for name, t in tensors.items()}, **new}, strict=False)


def _unmatched(expected: str, names: Sequence[str], others: Mapping[str, Any]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"to_torch(): expected {expected}, got no counterpart of {shown}, but {', '.join(list(others)[:3])}, ..."
