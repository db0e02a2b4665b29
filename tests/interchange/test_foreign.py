"""Networks of other projects: each row of the table in docs/torch.md says what `hg.from_torch` makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI

import halograd as hg
from halograd.errors import UserError
from tests.interchange.foreign import NETWORKS, compared, let_torchvision_load, returned
from tests.interchange.support import torch

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDS = ("torchvision", "monai", "timm", "segmentation_models_pytorch", "dynamic_network_architectures")

pytestmark = pytest.mark.torch


def _rows() -> dict[str, tuple[str, str]]:
    """Return the cells of the table by network."""
    text = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| ((?:nnU-Net|MONAI|smp|torchvision) [^|]*) \| ([^|]*) \| ?([^|]*)\|$", text, flags=re.M)
    return {name: (outputs, step.strip()) for name, outputs, step in found}


def test_the_table_has_all_networks():
    assert list(_rows()) == list(NETWORKS)


def _require() -> None:
    """Skip a test if a package is missing."""
    torch()
    let_torchvision_load()
    for package in NEEDS:
        pytest.importorskip(package, reason=f"needs {package}: pip install 'halograd[oracle-zoo]'")


#: Networks of each project that are trained on two ranks.
RETURNED = (
    "nnU-Net PlainConvUNet, 2-D",
    "nnU-Net ResidualEncoderUNet, 3-D",
    "MONAI BasicUNet, 2-D",
    "MONAI AttentionUnet, 3-D",
    "MONAI DynUNet, 2-D",
    "MONAI HighResNet, 2-D",
    "MONAI EfficientNet, 2-D",
    "torchvision ConvNeXt",
)
#: Networks like others here, which only the program compares: they would take more than two minutes.
BY_PROGRAM = (
    "MONAI BasicUNet, 3-D",
    "MONAI SwinUNETR, 2-D",
    "smp Unet",
    "smp UnetPlusPlus",
    "smp FPN",
    "smp DeepLabV3Plus",
    "smp MAnet",
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in (*RETURNED, *BY_PROGRAM)])
def test_a_network_of_another_project(name):
    """Outputs in evaluation and a step of SGD are those of torch in float64, or the node of the table is refused."""
    _require()
    outputs, step = _rows()[name]
    with hg.Communicator(MPI.COMM_SELF) as alone:
        if not outputs.startswith("refused"):
            assert max(compared(name, alone, {})) < 1e-10 and float(outputs) < 1e-10 and float(step) < 1e-10
            return
        node, kind = re.findall(r"`(.*)` \((\w+)\)", outputs)[0]
        with pytest.raises(UserError, match=rf"{re.escape(repr(node))} \({kind}\)"):
            compared(name, alone, {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", RETURNED)
def test_a_network_trained_on_two_ranks_goes_back(comm, name):
    _require()
    with hg.Communicator(comm) as ranks:
        assert returned(name, ranks, {"height": 2}) < 1e-5
