"""The installed wheel imports silently, holds its data, fits, predicts, saves, loads and scores."""

import subprocess
import sys
from pathlib import Path

quiet = "import sys, perturbdiff; assert 'torch' not in sys.modules, 'importing loads torch'"
done = subprocess.run([sys.executable, "-W", "error", "-c", quiet], capture_output=True, check=True)
assert not done.stdout + done.stderr, "importing is not silent"

import perturbdiff as ptd  # noqa: E402 - after the silence was checked

assert "site-packages" in str(Path(ptd.__file__)), "this is not the installed package"
assert Path(ptd.__file__).with_name("py.typed").exists()
adata = ptd.datasets.kang2018_small()
model = ptd.SetDiffusion.from_anndata(
    adata,
    perturbation_key="condition",
    control="ctrl",
    covariate_keys=["cell_type"],
    scale="counts",
)
model.fit(
    adata,
    holdout={"cell_type": ["NK"]},
    n_top_genes=200,
    train=ptd.TrainConfig(max_steps=20, check_every=10),
    options=ptd.TrainerOptions(progress=False),
)
question = {"perturbations": ["stim"], "contexts": [{"cell_type": "NK"}], "n_cells": 32}
pred = ptd.tl.predict(adata, model, **question)
model.save("bundle")
again = ptd.load("bundle").predict(adata, **question)
assert (pred.layers["counts"] != again.layers["counts"]).nnz == 0, (
    "a loaded model answers otherwise"
)
ptd.tl.score(pred, reference=adata)
sys.stdout.write(f"{pred.n_obs} cells predicted, {len(pred.uns['score'])} rows of scores\n")
