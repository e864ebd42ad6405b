"""Ways to serve the same model on the same engine: ours, request at a time, whole batches.

The other two are what LitServe does by itself with the model's own ``predict``.
"""

import argparse
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import litserve
import torch
from anndata import AnnData
from fastapi import Response

import perturbdiff as ptd
from perturbdiff.serve import ServeConfig, run
from perturbdiff.serve._formats import H5AD, to_h5ad

OURS = "step batches"
SINGLE = "request at a time"
WHOLE = "whole requests in batches"
AT_ONCE = 8
PLANS = 256  # populations that each of them may remember: as many as ours


class RequestAtATime(litserve.LitAPI):
    """Each request is one call of the model's ``predict``."""

    def __init__(self, bundle: str, threads: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.bundle, self.threads = bundle, threads

    def setup(self, device: str) -> None:
        """Load the model; called once in each worker."""
        torch.set_num_threads(self.threads)
        self.model = ptd.load(self.bundle, device=device)
        self.model.fitted.plans.size = PLANS

    def predict(self, x: Any) -> Any:
        """The answer to one request."""
        return self._asked([x])[0]

    def encode_response(self, output: bytes) -> Response:
        """The answer as a response."""
        return Response(output, media_type=H5AD)

    def _asked(self, requests: list[dict[str, Any]]) -> list[bytes]:
        """One call of the model for requests that differ in their contexts alone."""
        first = requests[0]
        contexts = list({str(c): c for one in requests for c in one["contexts"]}.values())
        pred = self.model.predict(
            None,
            perturbations=first["perturbations"],
            contexts=contexts,
            n_cells=max(one["n_cells"] for one in requests),
            seed=first["seed"],
            sample=ptd.SampleConfig(**first["sample"]),
        )
        if len(requests) == 1:
            return [to_h5ad(pred)]
        return [to_h5ad(self._own(pred, one)) for one in requests]

    @staticmethod
    def _own(pred: AnnData, request: dict[str, Any]) -> AnnData:
        """The cells of one of the requests."""
        rows = [
            pred.obs["cell_type"].to_numpy().astype(str) == context["cell_type"]
            for context in request["contexts"]
        ]
        return pred[[int(i) for row in rows for i in row.nonzero()[0][: request["n_cells"]]]].copy()


class WholeBatches(RequestAtATime):
    """Requests that wait together, and sample alike, share one call of ``predict``."""

    def __init__(self, bundle: str, threads: int) -> None:
        super().__init__(bundle, threads, max_batch_size=AT_ONCE, batch_timeout=0.02)

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Requests as they are."""
        return inputs

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Answers as they are."""
        return output

    def predict(self, x: list[dict[str, Any]]) -> list[bytes]:
        """One call for those that sample alike."""
        groups: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(x):
            groups[str((one["seed"], one["sample"], one["perturbations"]))].append(number)
        out: list[bytes] = [b""] * len(x)
        for numbers in groups.values():
            answers = self._asked([x[number] for number in numbers])
            for number, answer in zip(numbers, answers, strict=True):
                out[number] = answer
        return out


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arrangement", choices=(OURS, SINGLE, WHOLE))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    if asked.arrangement == OURS:
        run(
            asked.bundle,
            ServeConfig(
                port=asked.port, accelerator="cpu", workers_per_device=asked.workers,
                threads=asked.threads, cost_model=False, max_wait_s=3600, cached_plans=PLANS,
            ),
        )  # fmt: skip
        return
    kind = RequestAtATime if asked.arrangement == SINGLE else WholeBatches
    server = litserve.LitServer(
        kind(str(asked.bundle), asked.threads), accelerator="cpu",
        workers_per_device=asked.workers, timeout=False,
    )  # fmt: skip
    server.run(
        host="127.0.0.1", port=asked.port, num_api_servers=1, generate_client_file=False,
        log_level="warning",
    )  # fmt: skip


if __name__ == "__main__":
    main()
