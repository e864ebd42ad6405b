"""What a newcomer types wrongly is refused by name, where no type checker helps."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import perturbdiff as ptd
from perturbdiff import _errors

_PATH = "pred = 'p.h5ad': must be an AnnData; open the file first: anndata.read_h5ad('p.h5ad')"
CASES = {
    "text for a folder of checkpoints": (
        "ptd.SetDiffusion(model.registry).fit(adata, options=ptd.TrainerOptions("
        "checkpoint_dir='none', resume=True))",
        "no checkpoint in none to go on from",
    ),
    "a kind for a model": ("ptd.tl.predict(adata, ptd.SetDiffusion, **ask)", "is no model"),
    "nothing for a bundle": ("ptd.load(None)", "None is no path of a bundle"),
    "no covariates": (
        "ptd.SetDiffusion.from_anndata(adata, **(columns | {'covariate_keys': None}))",
        "must be a list of columns",
    ),
    "no column of perturbations": (
        "ptd.SetDiffusion.from_anndata(adata, **(columns | {'perturbation_key': None}))",
        "must be the name of the column",
    ),
    "nothing to draw limits from": ("ptd.pl.roofline({})", "lacks machines, runs"),
    "guidance without end": ("ptd.SampleConfig(guidance_scale=1e30)", "must be at most 100"),
    "noise without end": ("ptd.SampleConfig(sigma_max=1e38)", "must be at most 1e+06"),
    "next to no noise": ("ptd.SampleConfig(sigma_min=1e-300)", "must be at least 1e-06"),
    "a path for cells": ("ptd.tl.predict('cells.h5ad', model, **ask)", "read_h5ad('cells.h5ad')"),
    "a path to register": (
        "ptd.SetDiffusion.from_anndata('cells.h5ad', **columns)",
        "read_h5ad('cells.h5ad')",
    ),
    "a path to fit": ("ptd.MeanShift(model.registry).fit('cells.h5ad')", "must be an AnnData"),
    "a path to score": ("ptd.tl.score(pred, reference='cells.h5ad')", "reference = 'cells.h5ad'"),
    "a path to draw": ("ptd.pl.response('pred.h5ad', reference=adata)", "pred = 'pred.h5ad'"),
    "a path to normalise": ("ptd.pp.normalize('cells.h5ad')", "must be an AnnData"),
    "a path to check": (
        "ptd.pp.check('cells.h5ad', perturbation_key='condition', control='ctrl')",
        "read_h5ad('cells.h5ad')",
    ),
    "a path for a model": ("ptd.tl.predict(adata, 'bundle', **ask)", "model = 'bundle'"),
    "no contexts": ("model.predict(adata, **ask, contexts=[])", "contexts = []"),
    "a context of nothing": ("model.predict(adata, **ask, contexts=[{}])", "'cell_type': ..."),
    "contexts without names": ("model.predict(adata, **ask, contexts=['NK'])", "'cell_type': ..."),
    "two levels in one context": (
        "model.predict(adata, **ask, contexts=[{'cell_type': ['NK', 'B']}])",
        "list a context each: [{'cell_type': 'NK'}, {'cell_type': 'B'}]",
    ),
    "nothing to do about genes": (
        "ptd.tl.predict(adata, model, **ask, missing_genes=None)",
        "missing_genes = None: must be 'refuse' or 'infer'",
    ),
    "a model for cells": (
        "ptd.tl.predict(model, adata, **ask)",
        "model = 'AnnData': is no model: cells come first, and then the model.",
    ),
    "a path of a model to rank with": (
        "ptd.tl.rank_perturbations(adata, 'bundle', target=[ptd.AtLeast('G1', 1)])",
        "model = 'bundle': is no model",
    ),
    "a truth value for a file": (
        "ptd.pl.response(pred, reference=adata, save=True)",
        "must be the name of a file",
    ),
    "part of a cell": (
        "model.predict(adata, **ask, n_cells=1.5)",
        "n_cells = 1.5: must be a whole",
    ),
    "more cells than fit into memory": (
        "model.predict(adata, **ask, n_cells=10**12)",
        "the answer alone needs some",
    ),
    "cells in words": ("model.predict(adata, **ask, n_cells='9')", "must be a whole number"),
    "no seed": ("model.predict(adata, **ask, seed=None)", "seed = None: must be a whole number"),
    "a seed in words": ("model.predict(adata, **ask, seed='a')", "must be a whole number"),
    "a negative seed": ("model.fit(adata, seed=-1)", "seed = -1: must be at least 0"),
    "a seed that no file holds": (
        "model.predict(adata, **ask, seed=2**63)",
        "must be below 2**63, which files can hold",
    ),
    "a fit's seed that no file holds": ("model.fit(adata, seed=2**70)", "must be below 2**63"),
    "a diffusion's seed that no file holds": (
        "fresh.prepare_training(adata, seed=2**63)",
        "must be below 2**63",
    ),
    "a sibling's seed that no file holds": ("causal.fit(adata, seed=2**63)", "below 2**63"),
    "a ranking in words": (
        "ptd.tl.rank_perturbations(adata, fresh, target=ptd.AtLeast('G1', 1), at_once='all')",
        "at_once = 'all': must be a whole number",
    ),
    "a ranking's seed": (
        "ptd.tl.rank_perturbations(adata, fresh, target=[ptd.AtLeast('G1', 1)], seed='a')",
        "seed = 'a': must be a whole number",
    ),
    "a score's seed": ("ptd.tl.score(pred, reference=adata, seed=0.5)", "seed = 0.5"),
    "a diffusion's seed": (
        "ptd.SetDiffusion(model.registry).fit(adata, seed='a')",
        "seed = 'a': must be a whole number",
    ),
    "genes in words": (
        "ptd.MeanShift.from_anndata(adata, **columns).fit(adata, n_top_genes='many')",
        "n_top_genes = 'many'",
    ),
    "a misspelt setting": ("ptd.TrainConfig(max_step=3)", "Did you mean 'max_steps'?"),
    "part of a step": ("ptd.TrainConfig(max_steps=2.5)", "train.max_steps = 2.5: must be a whole"),
    "a truth value": ("ptd.SampleConfig(n_steps=True)", "must be a whole number"),
    "no number": ("ptd.TrainConfig(learning_rate=float('nan'))", "must be a number"),
    "an unknown sampler": ("ptd.SampleConfig(sampler='ddim')", "must be one of euler, heun"),
    "a misspelt column": (
        "ptd.MeanShift.from_anndata(adata, perturbation='condition')",
        "Did you mean 'perturbation_key'?",
    ),
    "a baseline that samples": (
        "ptd.tl.predict(adata, model, **ask, sample=ptd.SampleConfig())",
        "leave sample out",
    ),
    "control as a question": ("model.predict(adata, perturbations=['CTRL'])", "nearly control"),
    "control in capitals": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'control': 'CTRL'}))",
        "Did you mean 'ctrl'?",
    ),
    "another case of a context": (
        "model.predict(adata, **ask, contexts=[{'cell_type': 'Nk'}])",
        "Did you mean 'NK'?",
    ),
    "part of a context's name": (
        "model.predict(adata, **ask, contexts=[{'cell_type': 'Monocytes'}])",
        "Did you mean 'CD14 Monocytes'?",
    ),
    "no genes": ("model.predict(adata[:, []], **ask)", "no genes"),
    "no genes to register": ("ptd.MeanShift.from_anndata(adata[:, []], **columns)", "no genes"),
    "training as a mapping": (
        "fresh.fit(adata, train={'max_steps': 3})",
        "must be perturbdiff.TrainConfig(max_steps=3)",
    ),
    "training in words": ("fresh.fit(adata, train='fast')", "must be perturbdiff.TrainConfig(...)"),
    "sampling for training": ("fresh.fit(adata, train=ptd.SampleConfig())", "perturbdiff.TrainC"),
    "a decoder for a network": ("fresh.fit(adata, network=ptd.DecoderConfig())", "NetworkConfig"),
    "an empty network": ("fresh.prepare_training(adata, network={})", "network = {}: must be"),
    "options as a mapping": ("fresh.fit(adata, options={'devices': 1})", "TrainerOptions(devices"),
    "a causal network as a mapping": (
        "causal.fit(adata, network={'width': 8})",
        "must be perturbdiff.DecoderConfig(width=8)",
    ),
    "causal training in words": ("causal.fit(adata, train='fast')", "perturbdiff.TrainConfig"),
    "causal options": ("causal.fit(adata, options=3)", "options = 3: must be perturbdiff.Trainer"),
    "sampling as a mapping": (
        "fresh.predict(adata, **ask, sample={'n_steps': 3})",
        "must be perturbdiff.SampleConfig(n_steps=3)",
    ),
    "a number of samples": ("ptd.tl.predict(adata, fresh, **ask, sample=5)", "SampleConfig(...)"),
    "decoding as a mapping": ("causal.predict(adata, **ask, decode={'top_p': 1})", "DecodeConfig("),
    "control as a number": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'control': 0}))",
        "control = 0: must be labels of obs['condition'] as text, one or a list, such as '0'",
    ),
    "control as a truth value": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'control': False}))",
        "such as 'False'",
    ),
    "controls as numbers": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'control': ['ctrl', 1]}))",
        "such as ['ctrl', '1']",
    ),
    "no control": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'control': []}))",
        "control = []: must be labels",
    ),
    "an empty separator": (
        "ptd.MeanShift.from_anndata(adata, **columns, separator='')",
        "separator = '': must be text of one character or more",
    ),
    "a holdout without column": (
        "ptd.MeanShift(model.registry).fit(adata, holdout=['NK'])",
        "such as {'cell_type': [...]}",
    ),
    "a holdout of a number": (
        "ptd.MeanShift(model.registry).fit(adata, holdout={'cell_type': 3})",
        "holdout = {'cell_type': 3}: must map columns to lists of labels",
    ),
    "no perturbations": (
        "model.predict(adata, perturbations=None)",
        "perturbations = None: must be labels as text",
    ),
    "perturbations as numbers": (
        "model.predict(adata, perturbations=[1])",
        "perturbations = [1]: must be labels as text",
    ),
    "no counts anywhere": (
        "ptd.MeanShift(model.registry).fit(empty)",
        "adata.X is zero in all 210 labelled cells",
    ),
    "enforcement as a number": (
        "ptd.guidance.enforcement(5, projects=True, promised=[])",
        "enforce = 5: must be one of soft, hard, best_of",
    ),
    "enforcement as a class": (
        "ptd.guidance.enforcement([ptd.Soft], projects=True, promised=[])",
        "or settings such as perturbdiff.Soft()",
    ),
    "enforcement as a mapping": (
        "ptd.guidance.enforcement({}, projects=True, promised=[])",
        "enforce = {}: must be one of",
    ),
    "a constraint in words": (
        "fresh.predict(adata, **ask, constraints='ISG15')",
        "constraints = 'ISG15': must be constraints or functions, one or a list of them",
    ),
    "a constraint as a number": (
        "fresh.predict(adata, **ask, constraints=3)",
        "constraints = 3: must be constraints or functions",
    ),
    "a library size in words": (
        "ptd.LibrarySize('5')",
        "LibrarySize.at_least = '5': must be a number",
    ),
    "measured values in words": (
        "ptd.Observed(['g1'], ['high'])",
        "Observed.values = ['high']: must be numbers",
    ),
    "a strength in words": ("ptd.Soft(strength='a')", "Soft.strength = 'a': must be a number"),
    "a window in words": ("ptd.Soft(window='ab')", "Soft.window = 'a': must be a number"),
    "a window of one end": ("ptd.Soft(window=0.5)", "Soft.window = 0.5: must be two shares"),
    "part of a candidate": ("ptd.BestOf(n=2.5)", "BestOf.n = 2.5: must be a whole number"),
    "a temperature in words": (
        "ptd.Particles(temperature='warm')",
        "Particles.temperature = 'warm': must be a number",
    ),
    "a share of a state in words": (
        "ptd.StateFraction(None, 0, 'half')",
        "StateFraction.share = 'half': must be a number",
    ),
    "non-negative numbers": ("ptd.NonNegative([1])", "NonNegative.genes = [1]: must be the name"),
    "a way as a number": (
        "ptd.guidance.way_from_json(3)",
        "enforce = 3: must be the name of a way, or a mapping",
    ),
    "members as a number": (
        "ptd.guidance.from_json({'kind': 'all', 'members': 3})",
        "members = 3: must be a list of constraints",
    ),
    "a kind of no kind": (
        "ptd.guidance.from_json({'kind': ['all']})",
        "has no \"['all']\"",
    ),
    "a constraint on no gene": ("ptd.Unchanged([])", "Unchanged.genes = []: must be the name of"),
    "a value for no gene": ("ptd.AtLeast([], 1.0)", "AtLeast.gene = []: must be the name of"),
    "a gene as a number": ("ptd.FoldChange([1], 2.0)", "FoldChange.gene = [1]: must be the name"),
    "a value in words": ("ptd.AtLeast('g1', '2')", "AtLeast.value = '2': must be a number"),
    "a share in words": ("ptd.KnockDown('g1', '2')", "KnockDown.remaining = '2': must be a num"),
    "a level in words": (
        "ptd.tl.uncertainty(pred, model, reference=adata, level='0.9')",
        "level = '0.9': must be a number",
    ),
    "several levels": (
        "ptd.tl.uncertainty(pred, model, reference=adata, level=np.array([0.8, 0.9]))",
        "level = [0.8, 0.9]: must be a number",
    ),
    "a level in an array": (
        "ptd.tl.uncertainty(pred, model, reference=adata, level=np.array([0.9]))",
        "must be a number",
    ),
    "contexts as a number": (
        "model.predict(adata, **ask, contexts=3)",
        "contexts = 3: contexts must be mappings such as {'cell_type': ...}",
    ),
    "a table under a list": ("ptd.tl.summarise_scores(pred, key=['score'])", "must be text"),
    "covariates as a number": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'covariate_keys': 3}))",
        "covariate_keys = 3: must be a list of columns",
    ),
    "columns of library sizes": (
        "ptd.MeanShift.from_anndata(adata, **columns, library_size_key=['a'])",
        "library_size_key = ['a']: must be the name of a column",
    ),
    "a column that is no text": (
        "ptd.pp.normalize(adata, library_size_key=3)",
        "adata.obs has no 3. Known: 'condition', 'cell_type'.",
    ),
    "columns to normalise by": (
        "ptd.pp.normalize(adata, library_size_key=['a'])",
        "adata.obs has no ['a']",
    ),
    "a layer as a list": ("ptd.pp.normalize(adata, layer=['raw'])", "layer = ['raw']: must be"),
    "a scale as a number": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'scale': 3}))",
        "scale = 3 is not known",
    ),
    "several scales": (
        "ptd.MeanShift.from_anndata(adata, **(columns | {'scale': np.array(['counts', 'x'])}))",
        "is not known",
    ),
    "features under a list": (
        "ptd.MeanShift.from_anndata(adata, **columns, embedding_key=['a'])",
        "embedding_key = ['a']: must be the name of a table",
    ),
    "a separator as a number": (
        "ptd.pp.check(adata, perturbation_key='condition', control='ctrl', separator=3)",
        "separator = 3: must be text of one character or more",
    ),
    "metrics as a number": (
        "ptd.pl.scores(ptd.tl.score(pred, reference=adata, copy=True), metrics=3)",
        "The table of scores has no '3'",
    ),
    "genes of a trajectory as a number": (
        "ptd.pl.trajectory(walked, genes=3)",
        "genes = 3: must be two genes",
    ),
    "symbols as a number": (
        "ptd.pl.response(pred, reference=adata, gene_symbols=3)",
        "gene_symbols = 3: must be the name of a column of var",
    ),
    "symbols as a list": (
        "ptd.pl.uncertainty(pred, reference=adata, gene_symbols=['symbol'])",
        "gene_symbols = ['symbol']: must be the name of a column of var",
    ),
    "a rate in words": ("ptd.tl.response_genes(pred, fdr='a')", "fdr = 'a': must be a number"),
    "a table under a number": (
        "ptd.tl.score(pred, reference=adata, key_added=5)",
        "key_added = 5: must be text",
    ),
    "a table under nothing": (
        "ptd.tl.response(pred, reference=adata, key_added=None)",
        "key_added = None: must be text",
    ),
    "a baseline to rank with": (
        "ptd.tl.rank_perturbations(adata, model, target=[ptd.AtLeast('G1', 1)])",
        "model = 'MeanShift': does not rank perturbations; a SetDiffusion does",
    ),
    "a sibling to rank with": (
        "ptd.tl.rank_perturbations(adata, causal, target=[ptd.AtLeast('G1', 1)])",
        "model = 'CausalBaseline': does not rank perturbations",
    ),
    "a quote of a baseline": ("model.quote(adata, n_cells=8)", "'MeanShift': has no network"),
    "a baseline that trains": (
        "model.fit(adata, train=ptd.TrainConfig(max_steps=2))",
        "a MeanShift has no network to train; leave train out",
    ),
    "a misspelt setting of a baseline": (
        "model.fit(adata, n_topgenes=3)",
        "MeanShift.fit has no 'n_topgenes'. Did you mean 'n_top_genes'?",
    ),
    "doses in words": (
        "dosed.predict(adata, **ask, doses=['10+1'])",
        "doses = '10+1': must be a number",
    ),
    "labels of NumPy": (
        "model.predict(adata, perturbations=np.array(['Q']))",
        "unseen in training: 'Q'",
    ),
    "numbers of NumPy in a list": (
        "model.predict(adata, perturbations=[np.int64(1)])",
        "perturbations = [1]: must be labels as text",
    ),
    "a column of NumPy": (
        "model.predict(adata, **ask, contexts=[{np.str_('cell_typ'): 'NK'}])",
        "no 'cell_typ'. Did you mean 'cell_type'?",
    ),
    "negative doses": (
        "dosed.predict(adata, **ask, doses=np.array([1.0, -1.0]))",
        "doses = [1.0, -1.0]: must be finite and not negative",
    ),
    "a baseline to compile": (
        "model.compiled()",
        "compiled = 'MeanShift': is for the network of a SetDiffusion",
    ),
    "a sibling to compile": (
        "causal.compiled()",
        "compiled = 'CausalBaseline': is for",
    ),
    "models without names": (
        "ptd.profiling.compare([model], adata, **ask)",
        "models = 'list': must be predictors by name, such as {'mine': model}",
    ),
    "a number to profile": ("ptd.profiling.compare({'a': 3}, adata, **ask)", "'a' is a int, which"),
    "a baseline to profile": (
        "ptd.profiling.compare({'a': model}, adata, **ask)",
        "'a' is a MeanShift, which has no network to profile",
    ),
    "no cells to profile": (
        "ptd.profiling.compare({'a': fresh}, adata, **ask, n_cells=0)",
        "n_cells = 0: must be at least 1",
    ),
    "no numbers of cells to profile": (
        "ptd.profiling.compare({'a': fresh}, adata, **ask, n_cells=[])",
        "n_cells = []: must be one number of cells or more",
    ),
    "no run for the clock": (
        "ptd.profiling.compare({'a': fresh}, adata, **ask, repeats=0)",
        "repeats = 0: must be at least 1",
    ),
    "a profile of what was not fitted": (
        "ptd.profiling.compare({'a': fresh}, adata, **ask)",
        "was not fitted",
    ),
    "nothing to draw": ("ptd.pl.roofline(None)", "report = None: is no report of a profile"),
    "a folder without a report": ("ptd.pl.roofline('none')", "name a folder with a profile.json"),
    "no report to write": ("ptd.profiling.write(None, 'x')", "give what profiling.compare returns"),
    "a report without its trace": (
        "ptd.profiling.write({'machines': {}, 'runs': []}, 'x')",
        "lacks trace",
    ),
    "no report to tabulate": ("ptd.profiling.table(None)", "report = None: is no report"),
    "a table of a list": ("ptd.profiling.table([])", "report = 'list': is no report"),
    "a verifier of one argument": (
        "fresh.predict(adata, **ask, constraints=lambda cells: True)",
        "Verifier.check = '<lambda>': must take two arguments, (log1p, genes)",
    ),
    "a verifier that is no function": ("ptd.Verifier(3)", "Verifier.check = 'int': must take two"),
    "a classifier that names no state": (
        "ptd.StateFraction(type('Half', (), {'classes_': ['a', 'b']})(), 'a', 0.5)",
        "has no predict, which says the state of each cell",
    ),
    "a picture of no kind": (
        "ptd.pl.response(pred, reference=adata, save='x.xyz')",
        "save = 'x.xyz': must end in one of",
    ),
    "a path for a prediction in pl.scores": ("ptd.pl.scores('p.h5ad')", _PATH),
    "a path for a prediction in pl.uncertainty": ("ptd.pl.uncertainty('p.h5ad')", _PATH),
    "a path for a prediction in pl.trajectory": ("ptd.pl.trajectory('p.h5ad')", _PATH),
    "a path for a prediction in pl.constraints": ("ptd.pl.constraints('p.h5ad')", _PATH),
    "a path for a prediction in tl.summarise_scores": ("ptd.tl.summarise_scores('p.h5ad')", _PATH),
    "a path for a prediction in tl.response_genes": ("ptd.tl.response_genes('p.h5ad')", _PATH),
    "a path for a prediction in tl.score_constraints": (
        "ptd.tl.score_constraints('p.h5ad', reference=adata)",
        _PATH,
    ),
}
SCRIPT = """
import json, sys
import anndata
import numpy as np
import pandas as pd
import perturbdiff as ptd
adata = anndata.read_h5ad(sys.argv[1])
columns = dict(perturbation_key="condition", control="ctrl", covariate_keys=["cell_type"],
               scale="counts")
model = ptd.MeanShift.from_anndata(adata, **columns).fit(adata)
empty = adata.copy()
empty.X = empty.X * 0
marked = adata.copy()
marked.obs["dose"] = 1.0
dosed = ptd.MeanShift.from_anndata(marked, **columns, dose_key="dose").fit(marked)
fresh, causal = ptd.SetDiffusion(model.registry), ptd.CausalBaseline(model.registry)
ask = dict(perturbations=["A"])
pred = model.predict(adata, **ask, n_cells=8)
walked = pred.copy()
steps = ["cell", "stage", "step", "sigma", "axis_1", "axis_2"]
walked.uns["trajectory"] = pd.DataFrame({name: [0.0] for name in steps}).assign(cell="a", type="b")
said = {}
for name, code in json.loads(sys.stdin.read()).items():
    try:
        eval(code)
        said[name] = ["nothing", ""]
    except Exception as error:
        said[name] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(toy, tmp_path_factory):
    """Error and message of every case, in a process without the type checks of the tests."""
    folder = tmp_path_factory.mktemp("misuse")
    kinds = ["NK", "B", "CD14 Monocytes", "CD4 T", "CD8 T", "DC", "pDC"]
    toy(cell_types=kinds, n_each=10).write_h5ad(folder / "cells.h5ad")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder / "cells.h5ad"],
        input=json.dumps({name: code for name, (code, _) in CASES.items()}),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*.xyz"))
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(said, case):
    kind, message = said[case]
    assert issubclass(getattr(_errors, kind, int), _errors.PerturbDiffError), (kind, message)
    assert CASES[case][1] in message


def test_the_nearest_name_is_always_told():
    known = [f"T{number}" for number in range(20)] + ["CD14+ Monocytes"]
    assert _errors.nearest("monocytes", known) == "Did you mean 'CD14+ Monocytes'?"
    assert _errors.nearest("t19", known) == "Did you mean 'T19'?"
    far = _errors.nearest("XQ9", known)
    assert far.startswith("Nearest: 'T9'. Known: 'T0', ")
    assert far.endswith("(21 in all).")
    assert _errors.nearest("x", []) == "Known: none."
    assert _errors.nearest("x", ["alpha", "beta"]) == "Known: 'alpha', 'beta'."


ASK = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 12}


def test_one_constraint_needs_no_list(small_model, simulated_cells):
    gene = small_model.registry.genes[0]
    ask = ASK | {"sample": ptd.SampleConfig(n_steps=3, set_size=6)}
    for constraint in (ptd.AtLeast(gene, 1.0), lambda log1p, genes: len(genes) == log1p.shape[1]):
        one = ptd.tl.predict(simulated_cells, small_model, **ask, constraints=constraint)
        several = small_model.predict(simulated_cells, **ask, constraints=[constraint])
        assert np.array_equal(one.X.toarray(), several.X.toarray())
        assert len(one.uns["perturbdiff"]["constraints"]) == 1


@pytest.mark.parametrize(
    ("wish", "most"),
    [
        (lambda gene: ptd.AtLeast(gene, 50.0), "9.2104 log1p"),
        (lambda gene: ptd.Fix(gene, 9.3, per="population"), "9.2104 log1p"),
        (lambda gene: ptd.FoldChange(gene, 1e5), "10000 cp10k"),
        (lambda gene: ptd.AtLeast(gene, 1e7, scale="counts"), "counts"),
        (lambda gene: ptd.GeneSetShift([gene], 20.0), "9.2104 log1p"),
    ],
)
@pytest.mark.parametrize("enforce", [None, "soft", "best_of"])
def test_more_than_a_cell_holds_is_refused(small_model, simulated_cells, wish, most, enforce):
    wish = wish(small_model.registry.genes[0])
    told = rf"cannot hold together: .*; no gene has more than all counts of a cell.*{most}"
    with pytest.raises(_errors.ConstraintError, match=told):
        small_model.predict(simulated_cells, **ASK, constraints=wish, enforce=enforce)


def test_larger_libraries_hold_more(small_model, simulated_cells):
    gene, size = small_model.registry.genes[0], simulated_cells.obs["library_size"].max()
    many = ptd.AtLeast(gene, float(2 * size), scale="counts")
    with pytest.raises(_errors.ConstraintError, match="no gene has more"):
        small_model.predict(simulated_cells, **ASK, constraints=many)
    larger = ptd.LibrarySize(at_least=int(3 * size))
    pred = small_model.predict(simulated_cells, **ASK, constraints=[many, larger])
    assert pred.uns["perturbdiff"]["constraints"]["satisfied"].all()


@pytest.mark.parametrize("enforce", ["best_of", "branch", "particles", "depth_first", "soft"])
def test_what_was_not_reached_is_warned_about(small_model, simulated_cells, enforce, caplog):
    gene = small_model.registry.genes[0]
    ask = ASK | {"sample": ptd.SampleConfig(n_steps=3, set_size=6)}
    branch = ptd.Branch(share=1) if enforce == "branch" else enforce
    with caplog.at_level("WARNING", logger="perturbdiff"):
        pred = small_model.predict(
            simulated_cells, **ask, constraints=ptd.AtLeast(gene, 9.0), enforce=branch
        )
    row = pred.uns["perturbdiff"]["constraints"].iloc[0]
    assert not row["satisfied"]
    assert f"{gene} >= 9 log1p per cell: not satisfied in {row['condition']}" in caplog.text
    assert f"enforce = '{enforce}', off by up to {row['violation']:.3g} (log1p)" in caplog.text


def test_what_was_reached_is_not_warned_about(small_model, simulated_cells, caplog):
    gene = small_model.registry.genes[0]
    with caplog.at_level("WARNING", logger="perturbdiff"):
        small_model.predict(simulated_cells, **ASK, constraints=ptd.AtLeast(gene, 1.0))
    assert "not satisfied" not in caplog.text


def test_a_fold_change_is_reported_in_counts_per_10000(small_model, simulated_cells):
    gene = small_model.registry.genes[0]
    ask = ASK | {"n_cells": 300}
    pred = small_model.predict(simulated_cells, **ask, constraints=ptd.FoldChange(gene, 2.0))
    row = pred.uns["perturbdiff"]["constraints"].iloc[0]
    obs = simulated_cells.obs
    control = simulated_cells[(obs["perturbation"] == "control") & (obs["cell_type"] == "T1")]
    share = control[:, gene].X.toarray()[:, 0] / control.obs["library_size"] * 1e4
    assert row["unit"] == "cp10k"
    assert row["required_lower"] == row["required_upper"] == pytest.approx(2 * share.mean())
    assert row["reached"] == pytest.approx(np.expm1(pred[:, gene].X.toarray()).mean(), rel=1e-5)


@pytest.mark.parametrize("verdict", ["yes", None, float("nan"), np.array([1.0, 2.0])])
def test_a_verifier_must_judge(small_model, simulated_cells, verdict):
    wish = ptd.Verifier(lambda log1p, genes: verdict, name="markers")
    with pytest.raises(
        _errors.VerifierError, match=r"P1 in T1: The verifier markers returned .* one number"
    ):
        small_model.predict(simulated_cells, **ASK, constraints=wish)


def unsound(log1p, genes):
    return log1p[:, genes.index("no such gene")].mean() > 1


@pytest.mark.parametrize("enforce", [None, "soft", "branch", "particles", "depth_first"])
def test_a_verifier_that_fails_is_named_with_its_condition(small_model, simulated_cells, enforce):
    wishes = [ptd.AtLeast(small_model.registry.genes[0], 0.1), unsound]
    with pytest.raises(
        _errors.VerifierError,
        match=r"Cells of P1 in T1: The verifier unsound raised ValueError: .*",
    ) as caught:
        small_model.predict(simulated_cells, **ASK, constraints=wishes, enforce=enforce)
    assert type(caught.value.__cause__) is ValueError
    assert "cells of 30 genes" in str(caught.value)


def test_a_verifier_that_fails_in_a_ranking_is_named_too(small_model, simulated_cells):
    with pytest.raises(_errors.VerifierError, match="Cells of P2 in T1: The verifier unsound"):
        ptd.tl.rank_perturbations(
            simulated_cells, small_model, target=[unsound], perturbations=["P2"],
            contexts=ASK["contexts"], n_cells=8,
        )  # fmt: skip


def test_a_classifier_that_fails_is_named(small_model, simulated_cells):
    class Broken:
        classes_ = ("high", "low")

        def predict(self, log1p):
            raise RuntimeError("too few columns")

    wish = ptd.StateFraction(Broken(), "high", 0.5)
    with pytest.raises(
        _errors.VerifierError,
        match=r"P1 in T1: The classifier of share of cells in high = 0.5 raised RuntimeError: too",
    ):
        small_model.predict(simulated_cells, **ASK, constraints=wish)


@pytest.mark.parametrize(
    "label",
    [
        "control", "ctrl_2", "Control_1", "untreated", "DMSO", "vehicle", "mock", "PBS",
        "non-targeting", "NT", "NTC_3", "negative control",
    ],
)  # fmt: skip
def test_what_sounds_like_control_is_warned_about(toy, label, caplog):
    adata = toy(["ctrl", "A", label], n_each=4)
    columns = {"perturbation_key": "condition", "scale": "counts"}
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.Registry.from_anndata(adata, **columns, control=["ctrl", label])
        assert not caplog.text
        registry = ptd.Registry.from_anndata(adata, **columns, control="ctrl")
    assert label in registry.perturbations
    assert f"obs['condition'] has {label!r} beside the control label 'ctrl'" in caplog.text
    assert f"name every control label: control=['ctrl', {label!r}]" in caplog.text


@pytest.mark.parametrize("label", ["NT5E", "CTRL1A", "mockingbird", "NTS", "IFNB", "PBSX"])
def test_what_does_not_sound_like_control_is_not(toy, label, caplog):
    adata = toy(["ctrl", "A", label], n_each=4)
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.Registry.from_anndata(
            adata, perturbation_key="condition", control="ctrl", scale="counts"
        )
    assert not caplog.text


def test_one_is_no_plural(toy, caplog):
    assert [_errors.counted(n, "name") for n in (0, 1, 2)] == ["0 names", "1 name", "2 names"]
    columns = {"perturbation_key": "condition", "control": "ctrl", "scale": "counts"}
    adata = toy(n_each=12)
    adata.X = adata.X.toarray().astype(float)
    adata.X[:1] = 0
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.MeanShift.from_anndata(adata, **columns).fit(adata)
    assert "left out 1 cell without counts" in caplog.text
    adata.X[0, 0] = np.nan
    with pytest.raises(_errors.ExpressionError, match=r"adata.X holds 1 NaN or infinite value\."):
        ptd.Registry.from_anndata(adata, **columns)


def test_conditions_that_teach_nothing_are_named_as_people_name_them(toy, caplog):
    adata = toy(n_each=6)
    label, kind = adata.obs["condition"], adata.obs["cell_type"]
    lone = (label == "B") & (kind == "T")
    adata = adata[~((label == "ctrl") & (kind == "NK")) & ~(lone & (lone.cumsum() > 1))].copy()
    columns = {"perturbation_key": "condition", "control": "ctrl", "scale": "counts"}
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.MeanShift.from_anndata(adata, **columns, covariate_keys=["cell_type"]).fit(adata)
    assert "left out 2 conditions without control cells: 'A in NK', 'B in NK'" in caplog.text
    assert "left out 1 condition of one cell: 'B in T'" in caplog.text


def test_few_control_cells_are_warned_about(toy, caplog):
    adata = toy(n_each=12)
    columns = {"perturbation_key": "condition", "control": "ctrl", "scale": "counts"}
    model = ptd.MeanShift.from_anndata(adata, **columns, covariate_keys=["cell_type"]).fit(adata)
    lone = (adata.obs["condition"] != "ctrl") | (adata.obs["cell_type"] != "NK")
    lone.iloc[12] = True
    with caplog.at_level("WARNING", logger="perturbdiff"):
        model.predict(adata, perturbations=["A"], n_cells=4)
        assert not caplog.text
        model.predict(adata[lone.to_numpy()], perturbations=["A"], n_cells=4)
    assert "fewer than 10 control cells" in caplog.text
    assert "'NK (1)'" in caplog.text
    assert "'T (" not in caplog.text


def test_doses_beyond_the_trained_ones_are_marked_and_warned_about(toy, caplog):
    adata = toy(["ctrl", "A", "B"], cell_types=["T", "NK"], n_each=12)
    adata.obs["dose"] = [0.0] * 24 + [1.0, 2.0, 4.0] * 8 + [10.0] * 24
    columns = {"perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["cell_type"]}
    model = ptd.MeanShift.from_anndata(adata, **columns, scale="counts", dose_key="dose").fit(adata)
    ask = {"perturbations": ["A", "B"], "contexts": [{"cell_type": "T"}], "n_cells": 4}
    with caplog.at_level("WARNING", logger="perturbdiff"):
        inside = model.predict(adata, **(ask | {"perturbations": ["A"]}), doses=[1, 4])
        assert not caplog.text
        pred = model.predict(adata, **ask, doses=[2, 10])
    assert inside.uns["perturbdiff"]["support"]["supported"].tolist() == [True, True]
    support = pred.uns["perturbdiff"]["support"]
    assert support["supported"].tolist() == [True, False, False, True]
    assert support["reason"].tolist() == [
        "", "dose of A 10 is outside 1 to 4", "dose of B 2 is outside 10 to 10", "",
    ]  # fmt: skip
    assert "extrapolated" in caplog.text


def test_empty_control_cells_are_nobodys_partner(toy, caplog):
    """Their library size is zero, so that counts of theirs have no share."""
    adata = toy(n_each=12)
    adata.X = adata.X.toarray()
    adata.X[:3] = 0
    columns = {"perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["cell_type"]}
    model = ptd.MeanShift.from_anndata(adata, **columns, scale="counts").fit(adata)
    with caplog.at_level("WARNING", logger="perturbdiff"):
        pred = model.predict(adata, perturbations=["A"], contexts=[{"cell_type": "T"}], n_cells=20)
    assert "left out 3 control cells without counts" in caplog.text
    assert (pred.obs["library_size"] > 0).all()
    adata.X[:12] = 0
    with pytest.raises(_errors.LabelError, match=r"All control cells of \('T',\) are empty"):
        model.predict(adata, perturbations=["A"], n_cells=4)


def test_too_few_genes_to_infer_the_others_are_refused(simulated_cells, small_model, caplog):
    genes = list(small_model.registry.genes)
    ask = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 4}
    with pytest.raises(_errors.GeneOverlapError, match=r"Only 2 of the 30 genes.*\(7%\)"):
        small_model.predict(simulated_cells[:, genes[:2]], **ask, missing_genes="infer")
    with caplog.at_level("WARNING", logger="perturbdiff"):
        small_model.predict(simulated_cells[:, genes[:15]], **ask, missing_genes="infer")
    assert "lacks 15 of the 30 genes of the model (50 %)" in caplog.text


def test_fewer_variable_genes_than_asked_for_are_told_once(toy, caplog):
    adata = toy(n_each=12)
    adata.X = adata.X.toarray()
    adata.X[:, 6:] = 0
    columns = {"perturbation_key": "condition", "control": "ctrl", "scale": "counts"}
    with caplog.at_level("WARNING", logger="perturbdiff"):
        model = ptd.MeanShift.from_anndata(adata, **columns).fit(adata, n_top_genes=9)
    n_genes = len(model.registry.genes)
    assert n_genes < 9
    assert caplog.text.count(f"only {n_genes} genes vary; n_top_genes = 9") == 1


def test_empty_cells_teach_nothing_and_harm_nothing(simulated_cells, small_fit, caplog):
    """As if they were not there, in every part: axes, priors, folds, weights, baselines, scores."""
    empty = simulated_cells.copy()
    values, labels = empty.X.toarray(), empty.obs["perturbation"].to_numpy()
    rows = np.concatenate([np.flatnonzero(labels == name)[::25] for name in ("control", "P1")])
    values[rows] = 0
    empty.X = sp.csr_matrix(values)
    empty.obs["library_size"] = empty.obs["library_size"].where(values.any(1), 0)
    kept = np.setdiff1d(np.arange(empty.n_obs), rows)
    with caplog.at_level("WARNING", logger="perturbdiff"):
        model = small_fit(empty)
    assert f"left out {len(rows)} cells without counts" in caplog.text
    assert model.checksum == small_fit(empty[kept].copy()).checksum
    ask = {"perturbations": ["P1", "P2"], "contexts": [{"cell_type": "T1"}], "n_cells": 30}
    pred, same = (model.predict(cells, **ask) for cells in (empty, empty[kept]))
    assert np.array_equal(pred.X.toarray(), same.X.toarray())
    ptd.tl.score(pred, reference=empty)
    assert pred.uns["score"]["mae_shift"].notna().sum() > 10
