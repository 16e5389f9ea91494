"""Other trainers' real code, taken from a checkout, against the rules restated here.

Each test needs a checkout in the variable it names, e.g. MGDS_DIR=~/src/mgds. Only the functions that decide are
executed, taken out of their files, so none of the trainers has to be installed.
"""

import ast
import math
import os
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kohya_bucket import KohyaBuckets
from kohya_bucket.buckets.trainers import (
    AIToolkitBuckets,
    DiffusersBuckets,
    DiffusionPipeBuckets,
    EveryDream2Buckets,
    MusubiTunerBuckets,
    OneTrainerBuckets,
    SimpleTunerBuckets,
)

RNG = np.random.default_rng(20)
SIZES = np.concatenate(
    [
        RNG.integers(64, 5000, (3000, 2)),
        RNG.integers(1, 40, (500, 2)) * 64,
        np.array([(1, 1), (1024, 1024), (512, 512), (10_000, 64), (64, 10_000), (1920, 1080), (1080, 1920)]),
    ]
)


def source(variable: str, path: str) -> Path:
    root = os.environ.get(variable)
    if not root:
        pytest.skip(f"{variable} is not set: no checkout to compare with")
    file = Path(root) / path
    if not file.is_file():
        pytest.fail(f"{variable}={root} has no {path}")
    return file


def take(file: Path, names: set[str], **namespace) -> SimpleNamespace:
    """The named top-level functions, classes and constants of a file, executed without its imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kept = [
        node
        for node in tree.body
        if getattr(node, "name", None) in names
        or (isinstance(node, ast.Assign) and any(getattr(t, "id", "") in names for t in node.targets))
    ]
    namespace |= {"math": math, "np": np, "os": os, **vars(typing)}
    exec(compile(ast.Module([ast.parse("from __future__ import annotations").body[0], *kept], []), str(file), "exec"),
         namespace)  # fmt: skip
    return SimpleNamespace(**namespace)


def compare(rule, theirs) -> None:
    placement = rule.place(SIZES)
    different = []
    for (width, height), mine in zip(SIZES.tolist(), placement.bucket_sizes.tolist(), strict=True):
        their = theirs(width, height)
        if mine != list(their):
            different.append(((width, height), mine, tuple(their)))
    assert not different, f"{len(different)} of {len(SIZES)} differ, e.g. {different[:5]}"
    print(f"\n{type(rule).__name__}: {len(SIZES)} placements equal")


@pytest.mark.parametrize(("resolution", "quantization"), [(1024, 64), (512, 8), (768, 64)])
def test_one_trainer(resolution, quantization) -> None:
    file = source("MGDS_DIR", "src/mgds/pipelineModules/AspectBucketing.py")
    taken = take(
        file, {"AspectBucketing"}, PipelineModule=type("Base", (), {}), RandomAccessPipelineModule=type("Mixin", (), {})
    )
    module = object.__new__(taken.AspectBucketing)
    module.quantization = quantization
    buckets, aspects = module._AspectBucketing__create_automatic_buckets([resolution])
    module.bucket_resolutions = buckets
    module.bucket_aspects = {k: np.array(v) for k, v in aspects.items()}
    rule = OneTrainerBuckets(resolution, quantization)
    assert {(w, h) for h, w in buckets[resolution]} == {b.as_tuple() for b in rule.bucket_set}
    compare(rule, lambda w, h: module._AspectBucketing__get_bucket(None, h, w, resolution)[::-1])


@pytest.mark.parametrize("resolution", [(1024, 1024), (1328, 1328), (960, 544)])
@pytest.mark.parametrize("no_upscale", [False, True])
def test_musubi_tuner(resolution, no_upscale) -> None:
    file = source("MUSUBI_TUNER_DIR", "src/musubi_tuner/dataset/bucket.py")
    text = file.read_text(encoding="utf-8")
    used = (node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    names = {name: name for name in used if name.startswith("ARCHITECTURE_")}
    taken = take(file, {"BucketSelector"}, divisible_by=lambda n, d: n - n % d, **names)
    selector = taken.BucketSelector(resolution, True, no_upscale, "ARCHITECTURE_QWEN_IMAGE")
    rule = MusubiTunerBuckets(resolution, 16, no_upscale)
    if rule.bucket_set is not None:
        assert selector.bucket_resolutions == [b.as_tuple() for b in rule.bucket_set]

    def theirs(width, height):
        size = selector.get_bucket_resolution((width, height))
        return size if size and min(size) > 0 else (0, 0)

    compare(rule, theirs)


@pytest.mark.parametrize("resolution", [512, 768, 1024, 1060])
def test_everydream2(resolution) -> None:
    file = source("EVERYDREAM2_DIR", "data/aspects.py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {getattr(node, "name", "") or getattr(node.targets[0], "id", "") for node in tree.body
             if isinstance(node, (ast.Assign, ast.FunctionDef))}  # fmt: skip
    buckets = take(file, names).get_aspect_buckets(resolution)
    rule = EveryDream2Buckets(resolution)
    assert buckets == rule.bucket_set.sizes.tolist()
    compare(rule, lambda w, h: min(buckets, key=lambda b: abs(b[0] / b[1] - w / h)))


@pytest.mark.parametrize(("resolution", "divisibility"), [(1024, 16), (512, 32), (768, 8), (1328, 16)])
def test_diffusers(resolution, divisibility) -> None:
    file = source("DIFFUSERS_DIR", "src/diffusers/training_utils.py")
    names = {"find_nearest_bucket", "generate_aspect_ratio_buckets", "_DEFAULT_BUCKET_ASPECT_RATIOS"}
    taken = take(file, names)
    buckets = taken.generate_aspect_ratio_buckets(resolution, divisibility)
    rule = DiffusersBuckets(resolution, divisibility)
    assert [(w, h) for h, w in buckets] == [b.as_tuple() for b in rule.bucket_set]
    compare(rule, lambda w, h: buckets[taken.find_nearest_bucket(h, w, buckets)][::-1])


@pytest.mark.parametrize("options", [{}, {"num_ar_buckets": 40, "multiple": 32}, {"ar_buckets": [1.0, 1.5, 448 / 576]}])
def test_diffusion_pipe(options) -> None:
    file = source("DIFFUSION_PIPE_DIR", "utils/dataset.py")
    common = source("DIFFUSION_PIPE_DIR", "utils/common.py")
    taken = take(file, {"dedup_and_sort", "ROUND_DECIMAL_DIGITS", "DirectoryDataset"})
    rounding = take(common, {"round_to_nearest_multiple"}).round_to_nearest_multiple
    multiple = options.get("multiple", 16)
    directory = object.__new__(taken.DirectoryDataset)
    ars = options.get("ar_buckets") or np.geomspace(0.5, 2.0, num=options.get("num_ar_buckets", 7))
    directory.ars = taken.dedup_and_sort(ars)
    directory.log_ars = np.log(directory.ars)
    directory.frame_buckets = np.array([1])

    def theirs(width, height):
        aspect, _ = directory._find_closest_ar_bucket(np.log(width / height), 1, False)
        w = math.sqrt(1024**2 * aspect)
        return rounding(w, multiple), rounding(1024**2 / w, multiple)

    compare(DiffusionPipeBuckets(1024, **options), theirs)


@pytest.mark.parametrize(("resolution", "divisibility"), [(1024, 16), (512, 8), (768, 32), (1024, 64)])
def test_ai_toolkit(resolution, divisibility) -> None:
    file = source("AI_TOOLKIT_DIR", "toolkit/buckets.py")
    taken = take(file, {"get_bucket_for_image_size", "BucketResolution"})

    def theirs(width, height):
        bucket = taken.get_bucket_for_image_size(width, height, resolution, divisibility)
        return bucket["width"], bucket["height"]

    compare(AIToolkitBuckets(resolution, divisibility), theirs)


KINDS = SimpleNamespace(IMAGE=0, VIDEO=1, AUDIO=2)


def simple_tuner_keeps(edge: int, kind: str, **keys) -> "typing.Callable[[int, int], bool]":
    """Whether SimpleTuner trains an image of a size with `minimum_image_size = edge`, by its own functions."""
    state = SimpleNamespace(get_data_backend_config=lambda _: keys, get_args=lambda: None)
    file = source("SIMPLETUNER_DIR", "simpletuner/helpers/metadata/backends/base.py")
    taken = take(file, {"MetadataBackend"}, StateTracker=state, floor=math.floor, DatasetType=KINDS)
    backend = object.__new__(taken.MetadataBackend)
    converted = {"resolution_type": kind, "resolution": 1024, "minimum_image_size": edge}
    factory = source("SIMPLETUNER_DIR", "simpletuner/helpers/data_backend/factory.py")
    tree = ast.parse(factory.read_text(encoding="utf-8"))
    method = next(n for n in ast.walk(tree) if getattr(n, "name", "") == "_handle_resolution_conversion")
    method.returns, method.args.args[1].annotation = None, None
    space = {"DatasetType": KINDS, "ensure_dataset_type": lambda _, default: default}
    exec(compile(ast.Module([method], []), str(factory), "exec"), space)
    space["_handle_resolution_conversion"](SimpleNamespace(args=SimpleNamespace(resolution=1024, resolution_type=kind)),
                                           converted)  # fmt: skip
    backend.id, backend.minimum_num_frames, backend.maximum_num_frames, backend.dataset_type = "a", None, None, 0
    backend.dataset_config = {}
    backend.minimum_image_size, backend.resolution_type = converted["minimum_image_size"], converted["resolution_type"]
    return lambda w, h: backend.meets_resolution_requirements(image_metadata={"original_size": (w, h)})


ROWS = np.concatenate([
    SIZES,
    np.array([(768, 768), (767, 769), (768, 767), (2000, 400), (600, 983), (1024, 576), (589_824, 1), (589_823, 1)]),
])  # fmt: skip


@pytest.mark.parametrize("edge", [512, 768, 1024])
def test_simple_tuner_leaves_out_by_area_as_skip_image_resolution_with_sides_of_one_less_and_one_more(edge) -> None:
    keeps = simple_tuner_keeps(edge, "pixel_area")
    kept = [bool(keeps(w, h)) for w, h in ROWS.tolist()]
    assert kept == [
        w * h > (edge - 1) * (edge + 1) for w, h in ROWS.tolist()
    ]  # as sd-scripts, which leaves out up to it
    assert kept != [w * h > edge * edge for w, h in ROWS.tolist()]


@pytest.mark.parametrize(("kind", "keys"), [("pixel", {}), ("pixel_area", {"crop": True, "crop_aspect": "square"})])
def test_simple_tuner_leaves_out_by_both_edges(kind, keys) -> None:
    keeps = simple_tuner_keeps(768, kind, **keys)
    assert [bool(keeps(w, h)) for w, h in ROWS.tolist()] == [min(w, h) >= 768 for w, h in ROWS.tolist()]


def test_simple_tuner_limits_enlarging_only_where_aspects_are_drawn() -> None:
    file = source("SIMPLETUNER_DIR", "simpletuner/helpers/image_manipulation/training_sample.py")
    calls = [
        (function.name, call.func.attr)
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "_trim_aspect_bucket_list"
    ]
    assert calls == [("_select_random_aspect", "_trim_aspect_bucket_list")]
    taken = take(file, {"TrainingSample"}, Image=SimpleNamespace(Image=object))
    sample = object.__new__(taken.TrainingSample)
    sample.crop_aspect_buckets, sample.crop_aspect, sample.valid_metadata = [0.5, 1.0, 2.0], "closest", False
    sample.max_upscale_threshold = 0.0
    for width, height in SIZES.tolist():
        sample.aspect_ratio = round(width / height, 2)
        assert sample._select_random_aspect() == min([0.5, 1.0, 2.0], key=lambda b: abs(b - sample.aspect_ratio))


def test_no_fit_without_enlarging_is_ai_toolkits() -> None:
    theirs = AIToolkitBuckets(1024, 64).place(SIZES)
    enlarged = (theirs.bucket_sizes > SIZES).any(axis=1)
    assert 0.1 < enlarged.mean() < 0.9
    for fit in ("kohya", "largest", "standard"):
        ours = KohyaBuckets(1024, no_upscale=True, no_upscale_fit=fit).place(SIZES)
        assert (ours.bucket_sizes == theirs.bucket_sizes).all(axis=1).mean() < 0.6


@pytest.mark.parametrize(("resolution", "alignment"), [(1024, 64), (512, 8), (768, 64), (1024, 8)])
def test_simple_tuner(resolution, alignment) -> None:
    file = source("SIMPLETUNER_DIR", "simpletuner/helpers/multiaspect/image.py")
    state = SimpleNamespace(
        get_args=lambda: SimpleNamespace(aspect_bucket_alignment=alignment, aspect_bucket_rounding=None),
        get_resolution_by_aspect=lambda **_: None,
        set_resolution_by_aspect=lambda **_: None,
    )
    silent = SimpleNamespace(debug=lambda *_: None)
    image = SimpleNamespace(Image=type("NoImage", (), {}))
    from numbers import Real

    taken = take(file, {"MultiaspectImage"}, StateTracker=state, logger=silent, Image=image, Real=Real, sqrt=math.sqrt)
    theirs_class = taken.MultiaspectImage
    megapixels = resolution * resolution / 1e6
    square = theirs_class._round_to_nearest_multiple(math.sqrt(resolution * resolution))

    def theirs(width, height):
        aspect = theirs_class.calculate_image_aspect_ratio((width, height))
        if aspect == 0:
            return 0, 0
        target, _, adjusted = theirs_class.calculate_new_size_by_pixel_area(aspect, megapixels, (width, height))
        # training_sample.py: a bucket whose rounded aspect is 1.0 is the square.
        return (square, square) if adjusted == 1.0 else target

    compare(SimpleTunerBuckets(resolution, alignment), theirs)
