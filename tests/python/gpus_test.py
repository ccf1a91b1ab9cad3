# SPDX-License-Identifier: BSD-3-Clause
"""`trib info gpus`, on GPUs that tests/fake_driver makes up."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import built_or_skip

from tributary import tree

Trib = Callable[..., tuple[int, str, str]]

_FABRIC = "cuMemCreate: operation not permitted (CUDA error 800)"


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the driver and NVML, which are found there."""
    built_or_skip("trib-info")
    home = os.environ.get("TRIB_HOME", Path(__file__).resolve().parents[2] / "build")
    folder = Path(home) / "tests/fake_driver"
    if not (folder / "libcuda.so.1").exists():
        pytest.skip("the fake driver is not built")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("COLUMNS", "160")
    return folder


def _ask(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tree.info.cache_clear()
    gpus: dict[str, Any] = tree.info(with_gpus=True)["gpus"]
    return gpus


def _ways(gpus: dict[str, Any]) -> dict[str, list[str]]:
    return {row["kind"]: row["ways"] for row in gpus["memory"]}


def _words(text: str) -> str:
    return " ".join(text.split())


def test_two_gpus(trib: Trib) -> None:
    status, out, _ = trib("info", "gpus", "--json")
    assert status == 0
    data = json.loads(out)
    assert list(data) == ["gpus"]
    gpus = data["gpus"]
    assert (gpus["missing"], gpus["driver"], gpus["nvml"]) == ("", "13.0", "")
    assert [one["index"] for one in gpus["devices"]] == [0, 1]
    first = gpus["devices"][0]
    assert (first["name"], first["memory_bytes"]) == ("Fake H200", 140 << 30)
    assert (first["compute_capability"], first["kernels"]) == ("9.0", "sm_90")
    assert (first["pci"], first["mps"]) == ("fa4e:1a:00.0", False)
    assert first["uuid"] == "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
    assert gpus["links"] == [{"gpus": [0, 1], "kind": "nvlink", "nvlinks": 18, "ancestor": "PHB"}]

    # As docs/gpu.md has it: 'Which call goes which way', 'Buffers that GPUs have mapped'.
    rows = {row["kind"]: row for row in gpus["memory"]}
    assert {kind: (row["ways"], row["ways_on_shared_gpus"]) for kind, row in rows.items()} == {
        "cudaMalloc": (["ipc", "scratch"], ["ipc"]),
        "cuMemMap, POSIX file": (["file", "scratch"], ["file"]),
        "cuMemMap, fabric handle": (["scratch"], ["staging"]),
        "cuMemMap, no handle": (["scratch"], ["staging"]),
        "pool (cudaMallocAsync)": (["scratch"], ["staging"]),
        "managed": (["scratch"], ["staging"]),
        "pinned host": (["host", "scratch"], ["host", "staging"]),
        "plain host": (["host", "staging"], ["host", "staging"]),
    }
    tried = {kind: row["works"] for kind, row in rows.items()}
    assert tried.pop("cuMemMap, fabric handle") is False
    assert tried.pop("managed") is None and tried.pop("plain host") is None
    assert set(tried.values()) == {True}
    assert rows["cuMemMap, fabric handle"]["detail"] == _FABRIC
    assert rows["cuMemMap, fabric handle"]["remark"] == "not used; scratch serves such memory"


def test_tables(trib: Trib) -> None:
    status, out, _ = trib("info", "gpus")
    assert status == 0
    lines = [_words(line) for line in out.splitlines()]
    assert "GPU0 X NV18" in lines and "GPU1 NV18 X" in lines
    assert "0 Fake H200 140 GiB 9.0 sm_90, native fa4e:1a:00.0 - - no" in lines
    for words in ("mapped (IPC handle)", "not used; scratch serves", "CUDA error 800", "inboxes"):
        assert words in " ".join(lines), words
    whole = trib("info")[1]
    assert "NV18" in whole and "driver for CUDA 13.0; 2 x Fake H200 (140 GiB)" in whole


@pytest.mark.parametrize(
    ("links", "count", "cell"), [("nvlink", 18, "NV18"), ("pcie", 0, "PHB"), ("none", 0, "none")]
)
def test_links(
    links: str, count: int, cell: str, trib: Trib, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = _ask(monkeypatch, FAKE_LINKS=links)
    assert [(one["kind"], one["nvlinks"]) for one in gpus["links"]] == [(links, count)]
    is_direct = links != "none"
    assert _ways(gpus)["managed"] == ["scratch" if is_direct else "host_scratch"]
    assert _ways(gpus)["cudaMalloc"] == (["ipc", "scratch"] if is_direct else ["host_scratch"])
    assert f"GPU0 X {cell}" in _words(trib("info", "gpus")[1])


def test_without_nvml(
    fakes: Path, tmp_path: Path, trib: Trib, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(fakes / "libcuda.so.1")
    (tmp_path / "libnvidia-ml.so.1").touch()  # which the loader finds first, and refuses
    gpus = _ask(monkeypatch, LD_LIBRARY_PATH=str(tmp_path))
    assert "libnvidia-ml.so.1" in gpus["nvml"]
    assert [(one["kind"], one["nvlinks"]) for one in gpus["links"]] == [("nvlink", 0)]
    out = trib("info", "gpus")[1]
    assert "GPU0 X NV GPU1" in _words(out) and "How many NVLinks there are is not known" in out


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [("75", ""), ("80", "sm_80"), ("89", "sm_80"), ("90", "sm_90"), ("103", "PTX of sm_90")],
)
def test_kernels(capability: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are compiled if CMake is not told otherwise."""
    gpus = _ask(monkeypatch, FAKE_CAPABILITY=capability, FAKE_MPS="1")
    assert gpus["devices"][0]["kernels"] == kernels and gpus["devices"][1]["mps"] is True


def test_refusals_change_the_way(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _ask(monkeypatch, FAKE_NO="cuMemExportToShareableHandle,cuMemAllocAsync")
    assert _ways(gpus)["cudaMalloc"] == ["ipc", "scratch"]
    assert _ways(gpus)["cuMemMap, POSIX file"] == ["scratch"]
    assert gpus["memory"][1]["detail"].startswith("cuMemExportToShareableHandle: operation not")
    assert gpus["memory"][4]["works"] is False
    gpus = _ask(monkeypatch, FAKE_NO="cuIpcGetMemHandle")  # inboxes have such handles, too
    assert _ways(gpus)["cuMemMap, POSIX file"] == ["host_scratch"]
    assert gpus["memory"][0]["ways_on_shared_gpus"] == ["staging"]
    assert "host scratch" in trib("info", "gpus")[1]
    gpus = _ask(monkeypatch, FAKE_NO="cuDevicePrimaryCtxRetain")
    assert {row["works"] for row in gpus["memory"]} == {None}
    assert "no context on GPU 0" in gpus["memory"][0]["detail"]


@pytest.mark.parametrize(
    ("variable", "way"),
    [("TRIB_MAP", "scratch"), ("TRIB_P2P", "host_scratch"), ("TRIB_DEVICE", "staging")],
)
def test_settings_change_the_way(
    variable: str, way: str, trib: Trib, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ways(_ask(monkeypatch, **{variable: "off"}))["cudaMalloc"] == [way]
    assert f"{variable}=off is set" in trib("info", "gpus")[1]


def test_no_gpu(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _ask(monkeypatch, FAKE_GPUS="0")
    assert "no CUDA-capable device is detected (CUDA error 100)" in gpus["missing"]
    out = trib("info", "gpus")[1].strip()
    assert out.startswith("GPUs: none: the driver does not start: ") and "\n" not in out


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").touch()
    gpus = _ask(monkeypatch, LD_LIBRARY_PATH=str(tmp_path))
    assert gpus["missing"].startswith("no driver: ") and "libcuda.so.1" in gpus["missing"]


def test_old_driver(fakes: Path, trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what staging takes; nothing else may be asked of it."""
    old = fakes.parent / "mpi/protected"
    if not (old / "libcuda.so.1").exists():
        pytest.skip("the stand-in for a driver is not built")
    gpus = _ask(monkeypatch, LD_LIBRARY_PATH=str(old))
    assert gpus["driver"] == "11.0" and "too old for kernels" in gpus["missing"]
    assert "driver for CUDA 11.0, too old for kernels; 1 x stand-in" in _words(trib("info")[1])


def test_one_gpu(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _ask(monkeypatch, FAKE_GPUS="1")
    assert gpus["links"] == [] and _ways(gpus)["cudaMalloc"] == ["ipc", "scratch"]
    assert "Links" not in trib("info", "gpus")[1]
