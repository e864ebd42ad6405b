"""What this machine can do: matrix rates and copy bandwidth, measured and kept.

A rate is that of the best of several square products; a bandwidth that of copying an array far
larger than any cache, reads and writes both counted. Both belong to a device, a number of threads
and, for float32, a precision setting of torch. What cannot be run is None.
"""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import platformdirs
import torch

from perturbdiff.profiling._work import Work, product

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
_SIZES = (512, 1024, 2048)
_SECONDS = 0.25  # that each product is repeated for
_COPY_BYTES = 256 << 20
_FORMAT = 1
_MEASURED: dict[Path, dict[str, Any]] = {}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device as it was measured.

    Parameters
    ----------
    device, name
        Kind of device, and what it calls itself.
    threads
        Threads of torch on a CPU.
    precision
        torch's setting for float32 products.
    rates
        Operations a second of a matrix product, by type of number; None where it does not run.
    bandwidth
        Bytes a second.
    """

    device: str
    name: str
    threads: int
    precision: str
    torch: str
    rates: dict[str, float | None]
    bandwidth: float

    def rate(self, dtype: str) -> float | None:
        """Operations a second; None for a type that was not measured."""
        return self.rates.get(dtype)

    def ridge(self, dtype: str) -> float | None:
        """Operations a byte above which products, not memory, are the limit."""
        rate = self.rate(dtype)
        return None if rate is None else rate / self.bandwidth

    def limits(self, work: Work, *, dtype: str = "float32") -> dict[str, float | None]:
        """Seconds that products alone, and that bytes alone, would take at full rate."""
        rate = self.rate(dtype)
        return {
            "products": None if rate is None else work.operations / rate,
            "memory": work.bytes / self.bandwidth,
        }

    def judged(self, work: Work, seconds: float, *, dtype: str = "float32") -> dict[str, Any]:
        """How near to the limits some work ran, and which limit binds.

        Parameters
        ----------
        work, seconds
            What was done, and how long it took.
        dtype
            Of the products.

        Returns
        -------
        ``share_of_rate`` and ``share_of_bandwidth``; ``share_of_limit``: the larger of the two
        limits over the time it took; ``bound``: ``"products"``, ``"memory"``, or ``"overhead"``
        where it took more than four times the larger limit.
        """
        limits = {k: v for k, v in self.limits(work, dtype=dtype).items() if v is not None}
        if not work.bytes or seconds <= 0:
            nothing = dict.fromkeys(("share_of_rate", "share_of_bandwidth", "share_of_limit"))
            return {**nothing, "bound": None}
        name = max(limits, key=lambda key: limits[key])
        share = limits[name] / seconds
        return {
            "share_of_rate": limits["products"] / seconds if "products" in limits else None,
            "share_of_bandwidth": limits["memory"] / seconds,
            "share_of_limit": share,
            "bound": name if share >= _OVERHEAD else "overhead",
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


_OVERHEAD = 0.25


def this_machine(device: torch.device | str = "cpu", *, refresh: bool = False) -> Machine:
    """The machine, measured in some seconds the first time and read from the cache folder later.

    Parameters
    ----------
    device
        ``"cpu"`` or a CUDA device.
    refresh
        Measure again.

    Returns
    -------
    Rates and bandwidth for the threads and the precision that torch is set to now.
    """
    device = torch.device(device)
    path = cache_file("machine", *machine_names(device))
    if not refresh and (known := read_cache(path)) is not None:
        return Machine(**known)
    machine = measured(device)
    write_cache(path, machine.to_json())
    return machine


def measured(device: torch.device | str, *, seconds: float = _SECONDS) -> Machine:
    """The machine, measured now.

    Parameters
    ----------
    device
        ``"cpu"`` or a CUDA device.
    seconds
        That each product is repeated for.

    Returns
    -------
    Rates and bandwidth.
    """
    device = torch.device(device)
    name, threads, precision, version = machine_names(device)
    return Machine(
        device=device.type,
        name=name,
        threads=threads,
        precision=precision,
        torch=version,
        rates={key: _rate(device, dtype, seconds) for key, dtype in DTYPES.items()},
        bandwidth=_bandwidth(device, seconds),
    )


def device_name(device: torch.device) -> str:
    """What a device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine_names(device: torch.device | str) -> tuple[str, int, str, str]:
    """What measurements of time depend on: device, threads, precision and torch."""
    device = torch.device(device)
    precision = torch.get_float32_matmul_precision()
    return device_name(device), torch.get_num_threads(), precision, str(torch.__version__)


def run_seconds(device: torch.device, work: Callable[[], Any], seconds: float) -> list[float]:
    """Times of single runs, shortest first: as many as fit into some seconds, three at least.

    The shortest is what the machine does when nothing disturbs it, the middle one what to expect.
    """
    work()
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < 3 or time.perf_counter() - began < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return sorted(took)


def typical_seconds(device: torch.device, work: Callable[[], Any], seconds: float) -> float:
    """Median time of a run."""
    took = run_seconds(device, work, seconds)
    return took[len(took) // 2]


def _rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float | None:
    """Best rate over some sizes; larger ones only where the last was quick."""
    if dtype == torch.float8_e4m3fn and device.type == "cpu":
        return None  # a processor multiplies such numbers as float32
    best: float | None = None
    for size in _SIZES:
        try:
            one = _square(size, dtype, device)
            took = run_seconds(device, one, seconds)[0]
        except (RuntimeError, NotImplementedError):
            return best
        best = max(best or 0.0, product(size, size, size) / took)
        if took * 8 > 4 * seconds:
            break
    return best


def _square(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """A product of two square matrices."""
    if dtype == torch.int8:
        left = torch.ones(size, size, dtype=dtype, device=device)
        right = torch.ones(size, size, dtype=dtype, device=device).t()
        return lambda: torch._int_mm(left, right)
    if dtype == torch.float8_e4m3fn:
        left, right = (torch.ones(size, size, device=device).to(dtype) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)
    left, right = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _bandwidth(device: torch.device, seconds: float) -> float:
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / run_seconds(device, lambda: target.copy_(source), seconds)[0]


# What was measured is kept for the next process


def cache_file(kind: str, *names: object) -> Path:
    """Where a measurement is kept: named by all that it depends on."""
    digest = blake2b(json.dumps([_FORMAT, *map(str, names)]).encode(), digest_size=10).hexdigest()
    folder: Path = platformdirs.user_cache_path("perturbdiff")
    return folder / "profiling" / f"{kind}-{digest}.json"


def read_cache(path: Path) -> dict[str, Any] | None:
    """What was kept there; None where there is nothing that can be read."""
    if path in _MEASURED:
        return _MEASURED[path]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_cache(path: Path, content: dict[str, Any]) -> None:
    """Keep it: for this process, and for others if the folder can be written to."""
    _MEASURED[path] = content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(path)
    except OSError:
        return
