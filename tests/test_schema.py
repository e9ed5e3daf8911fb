"""Files that load are valid: whatever else is well-formed is refused, with the reason."""

import io
import json
import zipfile

import numpy as np
import pytest
from sample_files import FILES

import geode_jax

KINDS = {
    "posterior": (geode_jax.Posterior, "posterior_1.npz"),
    "density": (geode_jax.GeodeDensity, "density_1.npz"),
    "classifier": (geode_jax.GeodeClassifier, "classifier_1.npz"),
}


def _contents(name):
    with np.load(FILES / name) as file:
        arrays = {key: file[key] for key in file.files}
    return json.loads(str(arrays.pop("header"))), arrays


def _refused(tmp_path, kind, header, arrays, savez=np.savez):
    path = tmp_path / "changed.npz"
    savez(path, header=np.array(json.dumps(header)), **arrays)
    try:
        kind.load(path)
    except ValueError as error:
        assert str(error).startswith("path: expected a file written by")  # noqa: PT017
        return True
    return False


def _with_first(array, value):
    changed = array.copy()
    changed.reshape(-1)[0] = value
    return changed


def _changes(array):
    """What can be wrong with an array, in words, and the wrong array."""
    yield "a dtype that is not its own", array.astype(np.complex64 if array.dtype.kind == "f" else np.float32)
    yield "text", array.astype(str)
    yield "an axis too many", array[None]
    if array.ndim:
        yield "an axis too few", array[0]
        yield "one entry less", array[:-1]
        yield "one entry more along the last axis", np.concatenate([array, array[..., -1:]], axis=-1)
        yield "nothing", array[:0]
    if array.dtype.kind == "f":
        yield "half precision", array.astype(np.float16)
        yield "NaN", _with_first(array, np.nan)
        yield "inf", _with_first(array, np.inf)
    if array.dtype.kind == "i":
        yield "a negative count", _with_first(array, -1)


@pytest.mark.parametrize("name", KINDS)
def test_every_array_is_what_it_should_be(tmp_path, name):
    kind, file = KINDS[name]
    header, arrays = _contents(file)
    assert not _refused(tmp_path, kind, header, arrays)
    let_in = []
    for key, array in arrays.items():
        wrong = {"it is missing": None, **dict(_changes(array))}
        for words, value in wrong.items():
            changed = {**arrays, key: value}
            if value is None:
                del changed[key]
            if not _refused(tmp_path, kind, header, changed):
                let_in.append((key, words))
    assert let_in == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale", 0.0),
        ("scale", -1.0),
        ("draws.dimension", 2**30),
        ("dictionary.ranks", 3),
        ("draws.tau", 0.5),
        ("draws.neg_log_u", -1.0),
        ("draws.log_weights", 1.0),
        ("tree.is_present", False),
        ("adaptation.steps", -1.0),
    ],
)
def test_values_are_in_their_range(tmp_path, key, value):
    header, arrays = _contents("posterior_1.npz")
    assert _refused(tmp_path, geode_jax.Posterior, header, {**arrays, key: _with_first(arrays[key], value)})


def test_unknown_and_listed_arrays(tmp_path, posterior):
    header, arrays = _contents("posterior_1.npz")
    assert _refused(tmp_path, geode_jax.Posterior, header, {**arrays, "more": np.zeros(2)})
    new_header, new_arrays = posterior.to_archive()
    assert not _refused(tmp_path, geode_jax.Posterior, new_header, new_arrays)
    listed = {**new_header, "arrays": [*new_header["arrays"], "noise_root"]}
    assert _refused(tmp_path, geode_jax.Posterior, listed, new_arrays)  # its deletion would change every density
    for root in (np.ones((6, 6)), -np.eye(6), np.triu(np.ones((6, 6)))):
        assert _refused(tmp_path, geode_jax.Posterior, listed, {**new_arrays, "noise_root": root})
    assert not _refused(tmp_path, geode_jax.Posterior, listed, {**new_arrays, "noise_root": np.eye(6)})


@pytest.mark.parametrize("name", KINDS)
def test_versions_and_settings_at_every_level(tmp_path, name):
    kind, file = KINDS[name]
    header, arrays = _contents(file)

    def levels(part):
        yield part
        for inner in [part.get("model"), *part.get("members", []), *part.get("model", {}).get("members", [])]:
            if inner is not None:
                yield inner

    for level in levels(header):
        for key, values in {
            "version": (99, 0, True, "1", None),
            "format": ("another", None),
            "dictionary_settings": ({"class": "Prior"}, 3),
            "prior": ({"class": "SamplerSettings"}, {"class": "Prior", "tau_rate": "1"}),
            "sampler_settings": ({"class": "SamplerSettings", "num_samples": 1.5}, None),
        }.items():
            if key not in level:
                continue
            kept = level[key]
            for value in values:
                level[key] = value
                assert _refused(tmp_path, kind, header, arrays), (key, value)
            level[key] = kept
    assert not _refused(tmp_path, kind, header, arrays)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("density", {"n_features_in_": 3}),
        ("density", {"held_out_scores_": [1.0, float("nan")]}),
        ("density", {"held_out_scores_": [2.0, 1.0]}),
        ("density", {"held_out_scores_": "none"}),
        ("density", {"feature_names_in_": ["a"]}),
        ("density", {"feature_names_in_": [1, 2, 3, 4]}),
        ("density", {"n_features_in_": None}),
        ("classifier", {"classes_": ["down"]}),
        ("classifier", {"classes_": ["up", "up"]}),
    ],
)
def test_attributes_belong_to_the_model(tmp_path, name, attributes):
    kind, file = KINDS[name]
    header, arrays = _contents(file)
    assert _refused(tmp_path, kind, {**header, "attributes": {**header["attributes"], **attributes}}, arrays)
    left = {key: value for key, value in header["attributes"].items() if key not in attributes}
    if "feature_names_in_" not in attributes:
        assert _refused(tmp_path, kind, {**header, "attributes": left}, arrays)


@pytest.mark.parametrize(
    ("name", "attribute", "values"),
    [
        ("density", "held_out_scores_", ([2.0, 1.0], [1.0, np.nan], ["none"], [[1.0]], [1j], np.zeros((0, 3)), [1])),
        ("classifier", "classes_", (["down"], ["up", "up"], [["down", "up"]])),
        ("density", "n_features_in_", (3, 4, [4], [4, 4])),
        ("density", "posterior_", (1,)),
    ],
)
def test_attributes_that_are_arrays_belong_to_the_model(tmp_path, name, attribute, values):
    kind, _ = KINDS[name]
    header, arrays = _contents(f"{name}_2.npz")
    assert not _refused(tmp_path, kind, header, arrays)
    key = f"attribute.{attribute}"
    left = {name: value for name, value in header["attributes"].items() if name != attribute}
    for value in values:
        assert _refused(tmp_path, kind, {**header, "attributes": left}, {**arrays, key: np.array(value)}), value
    if key not in arrays:
        return
    assert _refused(tmp_path, kind, header, {name: array for name, array in arrays.items() if name != key})
    twice = {**header, "attributes": {**header["attributes"], attribute: arrays[key].tolist()}}
    assert _refused(tmp_path, kind, twice, arrays)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("y_mean_", (["1.5"], [1.5j], [[1.5]], [np.nan], [1.0, 2.0])),
        ("y_scale_", ([0.0], [-1.0], [1], [2j])),
        ("_y_ndim", (1.0, True, 3, [1])),
    ],
)
def test_responses_belong_to_the_model(tmp_path, name, values):
    """Files of a regressor whose joint density is that of the sample file: three features and a response."""
    header, arrays = _contents("density_2.npz")
    header["class"] = "GeodeRegressor"
    header["attributes"] = {"n_features_in_": 3, "_y_ndim": 1}
    arrays = {key: array for key, array in arrays.items() if not key.startswith("attribute.")}
    arrays |= {"attribute.y_mean_": np.array([1.5]), "attribute.y_scale_": np.array([2.0])}
    assert not _refused(tmp_path, geode_jax.GeodeRegressor, header, arrays)
    for value in values:
        if name == "_y_ndim":
            changed = {**header, "attributes": {**header["attributes"], name: value}}, arrays
        else:
            changed = header, {**arrays, f"attribute.{name}": np.array(value)}
        assert _refused(tmp_path, geode_jax.GeodeRegressor, *changed), value


def test_decisions_are_checked(tmp_path):
    header, arrays = _contents("posterior_2.npz")
    found = header["found"]
    assert not _refused(tmp_path, geode_jax.Posterior, header, arrays)
    assert found["decisions"]
    for key, value in {"gain": "1", "error": True, "why": 3, "taken": None}.items():
        decisions = [{**found["decisions"][0], key: value}]
        assert _refused(tmp_path, geode_jax.Posterior, {**header, "found": {**found, "decisions": decisions}}, arrays)
    for key, value in {"num_candidates": True, "span_rank": False, "rank_limit": 0, "rank": None}.items():
        assert _refused(tmp_path, geode_jax.Posterior, {**header, "found": {**found, key: value}}, arrays), key


def test_parameters_are_checked(tmp_path):
    header, arrays = _contents("density_1.npz")
    for wrong in ({"num_trees": "8"}, {"max_rank": 1.5}, {"more": 1}, {"num_chains": 0}):
        assert _refused(
            tmp_path, geode_jax.GeodeDensity, {**header, "parameters": {**header["parameters"], **wrong}}, arrays
        )


def test_a_small_file_never_becomes_large(tmp_path):
    """Compressed arrays, and arrays that say they are larger than the file, are not read."""
    header, arrays = _contents("posterior_1.npz")
    assert _refused(tmp_path, geode_jax.Posterior, header, arrays, np.savez_compressed)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for key, array in {"header": np.array(json.dumps(header)), **arrays}.items():
            block = io.BytesIO()
            np.save(block, np.zeros(2**24) if key == "shift" else array)
            file.writestr(f"{key}.npy", block.getvalue())
    assert path.stat().st_size < 2**20
    with pytest.raises(ValueError, match="compressed arrays"):
        geode_jax.Posterior.load(path)
