"""How a saved model is served: settings that a run file may hold beside those of the model."""

from dataclasses import dataclass, fields
from typing import ClassVar

from perturbdiff._errors import ConfigError
from perturbdiff.config._checks import Settings, whole_number

HOSTS = ("0.0.0.0", "127.0.0.1", "::")  # what the engine can listen on


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Settings):
    """How a saved model is served.

    Parameters
    ----------
    host, port
        Where to listen.
    accelerator, devices
        ``"cpu"``, ``"cuda"`` or ``"auto"``, and how many of them; 0 is all.
    workers_per_device, api_servers, threads
        Processes that compute, processes that speak HTTP, and threads of each computing process.
    desk_threads
        Threads of a worker that read questions, solve and draw beside the denoising.
    n_sets
        Most sets in a denoising batch.
    max_body_mb
        Largest request in millions of bytes; looked at before anything is parsed.
    max_cells, max_set_steps
        Most cells of a request over all its conditions, and most steps of sets of 32 cells.
    max_requests, max_wait_s
        Requests in the house at a time, and seconds of work that may wait; beyond is a 429.
    deadline_s
        Seconds after which a request is given up, unless it asks for fewer.
    grace_s
        Seconds that running requests get after SIGTERM.
    cached_controls, cached_plans, cached_cells_mb
        Contexts whose control cells stay read and encoded, populations that stay solved, and
        millions of bytes of cells that stay drawn.
    cost_model
        Have the cost model measure the machine before the first request, where it did not yet.
    """

    section: ClassVar[str] = "serve"

    host: str = "127.0.0.1"
    port: int = 8000
    accelerator: str = "auto"
    devices: int = 0
    workers_per_device: int = 1
    api_servers: int = 1
    threads: int = 1
    desk_threads: int = 2
    n_sets: int = 64
    max_body_mb: float = 100.0
    max_cells: int = 200_000
    max_set_steps: int = 200_000
    max_requests: int = 256
    max_wait_s: float = 120.0
    deadline_s: float = 600.0
    grace_s: float = 30.0
    cached_controls: int = 64
    cached_plans: int = 256
    cached_cells_mb: float = 64.0
    cost_model: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in {"host": HOSTS, "accelerator": ("cpu", "cuda", "auto")}.items():
            if getattr(self, name) not in known:
                place, rule = f"serve.{name}", f"must be one of {', '.join(known)}"
                raise ConfigError(place, getattr(self, name), rule=rule)
        if not 1024 <= self.port <= 65535:
            raise ConfigError("serve.port", self.port, rule="must be 1024 to 65535")
        for one in fields(self):
            place, value = f"serve.{one.name}", getattr(self, one.name)
            if isinstance(value, float) and not value > 0:
                raise ConfigError(place, value, rule="must be above 0")
            if isinstance(value, int) and not isinstance(value, bool):
                whole_number(place, value, least=0 if one.name == "devices" else 1)
