"""Tensors of a torch file that have no plain values: each is a line with the file and the entry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstorder.cli import main
from lab.doctor import dumps
from lab.doctor.importers import load_trace
from tests.lab.doctor.test_importers import ROWS, write_slime

ODD = {
    "sparse": (lambda: torch.zeros(3, 4).to_sparse(), "one of layout torch.sparse_coo"),
    "meta": (lambda: torch.zeros(3, device="meta"), "one on meta"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "a nested one"),
    "expanded": (
        lambda: torch.zeros(1).expand(2**20, 2**16), "one of 274,877,906,944 bytes in 4; save tensor.contiguous()",
    ),
}  # fmt: skip


def write(kind: str, folder: Path) -> Path:
    return write_slime(folder / "t.pt", ROWS) if kind == "slime" else dumps.miles(folder, ROWS)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", ["slime", "miles"])
def test_a_tensor_without_plain_values_is_one_line(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another layout or device, or more values than bytes: file and entry, before any memory is taken for them."""
    make, got = ODD[name]
    path = write(kind, tmp_path)
    torch.save(torch.load(path, weights_only=False) | {"extra": {"odd": [1, make()]}}, path)
    assert main(["doctor", str(path)]) == 2
    wanted = "extra.odd.1: expected a dense CPU tensor no larger than its storage"
    assert capsys.readouterr().err == f"error: {path}: {wanted}, got {got}\n"


def test_views_and_a_list_that_holds_itself_are_read(tmp_path: Path) -> None:
    """Tensors that share a storage, transposed, cut or repeated, have their values; a circle of entries ends."""
    path = write("slime", tmp_path)
    before = load_trace(path)
    circle: list[object] = []
    circle.append(circle)
    base = torch.arange(12.0).reshape(3, 4)
    extra = [base.T, base[1:, ::2], base[:1].expand(9, 4), circle]
    torch.save(torch.load(path, weights_only=False) | {"extra": extra}, path)
    assert load_trace(path).tokens.tolist() == before.tokens.tolist()
