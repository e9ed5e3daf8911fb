import dataclasses
import re

import equinox as eqx
import numpy as np
import pytest

from geode_jax import GammaPrior, Posterior, Prior, diagnostics
from geode_jax.model.found import Decision, Found


def _with_log_joint(posterior, values):
    return eqx.tree_at(lambda it: it.draws.log_joint, posterior, values)


@pytest.fixture(scope="module")
def clean(posterior):
    """Draws of every quantity replaced by white noise: 2 trees, 2 chains, 400 draws."""
    rng = np.random.default_rng(0)
    draws = posterior.draws

    def noise(leaf):
        return rng.normal(size=(2, 2, 400, *leaf.shape[3:]))

    replaced = eqx.tree_at(
        lambda it: (it.log_joint, it.log_sigma2, it.log_weights, it.count, it.is_active, it.dimension),
        draws,
        (
            noise(draws.log_joint),
            noise(draws.log_sigma2),
            -np.log(7.0) + 0.1 * noise(draws.log_weights),
            rng.integers(5, 20, size=(2, 2, 400, 7)),
            np.ones((2, 2, 400, 7, 3), bool),
            rng.integers(0, 3, size=(2, 2, 400, 7)),
        ),
    )
    return eqx.tree_at(lambda it: it.draws, posterior, replaced)


def test_white_noise_is_healthy(clean):
    found = diagnostics.diagnose(clean)
    assert {entry.tree for entry in found} == {0, 1}
    assert {entry.quantity for entry in found} >= {"log joint", "log sigma at scale 0", "weight of scale 2"}
    assert all(entry.r_hat < 1.02 for entry in found)
    assert all(entry.ess_bulk > 400 for entry in found)
    assert all(entry.ess_tail > 300 for entry in found)


@pytest.mark.parametrize("num_draws", [9, 400])
def test_draws_that_alternate_are_worth_more_than_independent_ones(num_draws):
    """But no more than S log10(S) of S, as in ArviZ; the plain estimate is often negative."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 1, num_draws))
    for step in range(1, num_draws):
        values[..., step] -= 0.9 * values[..., step - 1]
    most = num_draws * np.log10(num_draws)
    found = [diagnostics._effective(chain) for chain in values]
    assert all(0.0 < one <= most for one in found)
    if num_draws == 400:
        assert min(found) > num_draws


def test_report_of_a_healthy_run_says_so(clean):
    free = eqx.tree_at(lambda it: it.draws.dimension, clean, np.ones_like(clean.draws.dimension))
    assert diagnostics.report(free).startswith("no problem found: chains agree")


def test_chains_that_disagree_are_told(clean):
    shifted = clean.draws.log_joint + np.array([0.0, 3.0])[:, None] * np.array([1.0, 0.0])[:, None, None]
    text = diagnostics.report(_with_log_joint(clean, shifted))
    assert "tree 0, log joint: chains" in text
    assert "tree 1, log joint" not in text


def test_drift_within_one_chain_is_told(clean):
    drift = clean.draws.log_joint + np.linspace(0, 4, 400)
    assert "log joint: chains (or the halves of one) disagree" in diagnostics.report(_with_log_joint(clean, drift))


def test_different_spread_is_told(clean):
    """Same centre, other scale: only the folded draws show it."""
    wide = clean.draws.log_joint * np.array([1.0, 6.0])[:, None]
    assert "log joint: chains" in diagnostics.report(_with_log_joint(clean, wide))


def test_slow_mixing_is_told(clean):
    rng = np.random.default_rng(1)
    slow = np.zeros((2, 2, 400))
    for t in range(1, 400):
        slow[:, :, t] = 0.9 * slow[:, :, t - 1] + rng.normal(size=(2, 2))
    found = [entry for entry in diagnostics.diagnose(_with_log_joint(clean, slow)) if entry.quantity == "log joint"]
    assert [entry.tree for entry in found] == [0, 1]
    # the true effective size of 800 draws of this process is 800 (1 - 0.9) / (1 + 0.9) = 42
    assert all(15 < entry.ess_bulk < 110 for entry in found)


def test_few_effective_draws_are_told(clean):
    """Where all halves of chains agree, but go slowly through what they agree on."""
    wave = np.sin(2 * np.pi * np.arange(400) / 200) + 0.1 * clean.draws.log_joint
    text = diagnostics.report(_with_log_joint(clean, wave))
    for tree in range(2):
        (told,) = re.findall(rf"tree {tree}, log joint: only (\d+) effective draws; raise num_samples", text)
        assert 0 < int(told) < diagnostics.FEWEST_EFFECTIVE
    assert "log joint: chains" not in text
    assert "log joint" not in diagnostics.report(clean)


def test_a_rank_that_is_cut_off_is_told(clean):
    cut = eqx.tree_at(lambda it: it.draws.dimension, clean, np.full_like(clean.draws.dimension, 3))
    assert cut.found.rank_limit == 3
    assert cut.intrinsic_dimension is None
    assert "100% of the rows use all 3 directions" in diagnostics.report(cut)
    # held-out rows chose 3 of 5; older files do not say what was allowed
    for limit in (5, None):
        chosen = dataclasses.replace(cut, found=dataclasses.replace(cut.found, rank_limit=limit))
        assert chosen.intrinsic_dimension == 3
        assert "use all" not in diagnostics.report(chosen)


def test_what_was_allowed_is_kept_in_files(posterior, tmp_path):
    posterior.save(tmp_path / "posterior.npz")
    assert Posterior.load(tmp_path / "posterior.npz").found == posterior.found
    header = posterior.found.to_header()
    assert Found.from_header({name: value for name, value in header.items() if name != "rank_limit"}).rank_limit is None
    with pytest.raises(ValueError, match="not sizes"):
        Found.from_header({**header, "rank_limit": 0.5})


def test_chains_that_stand_still_apart_are_told(clean):
    still = np.broadcast_to(np.array([1.0, 2.0])[:, None], (2, 2, 400))
    assert "log joint: chains (or the halves of one) disagree, R-hat inf" in diagnostics.report(
        _with_log_joint(clean, still)
    )


def test_densities_of_rows_are_watched(posterior, data, monkeypatch):
    """With rows, their log densities are quantities too; a chain that disagrees there is told."""
    found = {entry.quantity for entry in diagnostics.diagnose(posterior, data[:2])}
    assert {"mean log density of the rows", "log density of row 0", "log density of row 1"} <= found
    monkeypatch.setattr(diagnostics, "MOST_TOLD", 100)
    louder = posterior.draws.log_sigma2 + np.array([0.0, 2.0])[:, None, None]
    shifted = eqx.tree_at(lambda it: it.draws.log_sigma2, posterior, louder)
    assert "log density of row 1: chains" in diagnostics.report(shifted, data[:2])


def test_learned_concentration_is_watched(clean):
    prior = Prior(stop_concentration=GammaPrior())
    learned = eqx.tree_at(
        lambda it: it.draws.log_stop_concentration, clean, np.random.default_rng(3).normal(size=(2, 2, 400))
    )
    learned = dataclasses.replace(learned, prior=prior)
    assert "log stop concentration" in {entry.quantity for entry in diagnostics.diagnose(learned)}


def test_what_stage_one_chose_is_told(clean):
    """Every choice once, with its gain where something was tried."""
    decisions = (
        Decision("shared span", "none", "gain of nodes within 2 common directions", -0.31, 0.042),
        Decision("directions per node", "3", "as given"),
    )
    text = diagnostics.report(dataclasses.replace(clean, found=dataclasses.replace(clean.found, decisions=decisions)))
    assert text.splitlines()[-2:] == [
        "chosen from the data: shared span: none (gain of nodes within 2 common directions: -0.31 +- 0.042 nats per"
        " held-out row)",
        "chosen from the data: directions per node: 3 (as given)",
    ]


def test_chains_with_other_directions_are_told(clean):
    """Their log joints differ by construction: said once, instead of a wrong advice about them."""
    is_active = clean.draws.is_active.copy()
    is_active[0, 1, :, 0, 2] = False
    shifted = clean.draws.log_joint + np.array([0.0, 30.0])[:, None]
    changed = eqx.tree_at(lambda it: (it.draws.is_active, it.draws.log_joint), clean, (is_active, shifted))
    text = diagnostics.report(changed)
    assert "tree 0: after adaptation the chains use different directions" in text
    assert "tree 0, log joint" not in text
    assert "tree 1, log joint: chains" in text


def test_noise_that_collapsed_is_told(clean):
    log_sigma2 = clean.draws.log_sigma2.copy()
    log_sigma2[..., 2] = 2.0 * np.log(5e-5)
    text = diagnostics.report(eqx.tree_at(lambda it: it.draws.log_sigma2, clean, log_sigma2))
    assert "scale 2: the noise has collapsed to 5e-05 of the features' units" in text
    assert "scale 1: the noise" not in text


def test_scales_that_hold_no_row_are_told(clean):
    count = clean.draws.count.copy()
    count[..., 3:] = 0
    text = diagnostics.report(eqx.tree_at(lambda it: it.draws.count, clean, count))
    assert "scales 2 to 2 hold no row; depth=1" in text
    one = np.zeros_like(count)  # a single row, now at this scale and now at that
    for draw in range(count.shape[2]):
        one[:, :, draw, (0, 1, 3)[draw % 3]] = 1
    assert "scales 1 to 2 hold no row" in diagnostics.report(eqx.tree_at(lambda it: it.draws.count, clean, one))
    count[1, ..., 5] = 3  # one tree uses it
    assert "hold no row" not in diagnostics.report(eqx.tree_at(lambda it: it.draws.count, clean, count))


def test_mass_that_candidates_leave_out_is_told(clean):
    few = dataclasses.replace(clean, lost_mass=np.array([0.0, 0.05]))
    assert "candidate nodes leave out 2.5% of the posterior mass" in diagnostics.report(few)
    assert "candidate" not in diagnostics.report(dataclasses.replace(clean, lost_mass=np.array([0.001, 0.002])))


def test_constant_quantities_and_few_draws(posterior):
    constant = _with_log_joint(posterior, np.full((2, 2, 30), 5.0))
    assert all(np.isfinite(entry.r_hat) for entry in diagnostics.diagnose(constant))
    short = eqx.tree_at(lambda it: it.draws.log_joint, posterior, np.zeros((2, 2, 3)))
    with pytest.raises(ValueError, match="at least 4 draws per chain, got 3"):
        diagnostics.diagnose(short)


def test_real_chains(posterior):
    assert not any(np.isnan(entry.r_hat) or np.isnan(entry.ess_bulk) for entry in diagnostics.diagnose(posterior))
    assert isinstance(diagnostics.report(posterior), str)


def test_a_report_tells_the_worst_and_counts_the_rest(posterior, data):
    """A short chain has many quantities beyond the limits: nobody reads hundreds of lines."""
    posterior = eqx.tree_at(lambda it: it.draws.is_active, posterior, np.ones_like(posterior.draws.is_active))
    found = diagnostics.diagnose(posterior, data[:40])
    disagree = sorted((one.r_hat for one in found if not one.r_hat <= diagnostics.LARGEST_R_HAT), reverse=True)
    assert len(disagree) > 10
    lines = diagnostics.report(posterior, data[:40]).splitlines()
    told = [line for line in lines if "disagree, R-hat" in line]
    assert [float(line.split("R-hat ")[1].split(";")[0]) for line in told] == pytest.approx(disagree[:5], abs=0.006)
    assert f"{len(disagree) - 5} more of {len(found)} quantities in which chains disagree: diagnose has" in "\n".join(
        lines
    )
    assert sum("effective draws; raise" in line for line in lines) <= 5
    assert any(line.startswith("these limits are for parameters") for line in lines)
