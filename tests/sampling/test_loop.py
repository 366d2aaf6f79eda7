"""The host loop: phases, checks, callbacks, interruption and resume, on a small analytic denoiser."""

from __future__ import annotations

import json
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from videodiff.attention.api import HeadStats
from videodiff.sampling.loop import (
    LoopState,
    NonFiniteError,
    SamplingInterrupted,
    StepPrograms,
    load_state,
    run,
    save_state,
    start,
)
from videodiff.sampling.solvers import make_solver, solver_names
from videodiff.schedule import Segment, StepPlan

SHAPE = (2, 3, 4, 5, 6)
NOISE = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
DENSE = StepPlan((Segment(0, 2, 1.0),), True)
SPARSE = StepPlan((Segment(0, 1, 1.0), Segment(1, 2, 0.3)), True)
N = 6
PLANS = (DENSE, DENSE, *(SPARSE,) * (N - 2))


def denoise(operands, latents, timestep, step, plan):
    """A nonlinear velocity that depends on everything it is given; statistics tell the step and the plan."""
    slope = sum(s.density * (s.stop - s.start) for s in plan.segments)
    v = jnp.tanh(operands["w"] * latents + timestep / 1000) * slope - 0.3 * latents
    stats = HeadStats(jnp.full((2, 4, 3), len(plan.segments), jnp.int32), jnp.full((2, 4, 3), step, jnp.float32))
    return v, stats


OPERANDS = {"w": jnp.float32(1.3)}
PROGRAMS = StepPrograms(denoise)  # shared: tests that count compilations make their own


def sample(solver=None, programs=PROGRAMS, state=None, plans=PLANS, operands=OPERANDS, **kwargs):
    solver = solver or make_solver("unipc", N, 3.0)
    return run(programs, operands, solver, plans, state or start(solver, NOISE), **kwargs)


def by_hand(solver, plans=PLANS) -> np.ndarray:
    """The same run without the loop."""
    x = jnp.asarray(NOISE)
    state = solver.init(x)
    for i in range(solver.steps):
        v, _ = denoise(OPERANDS, x, solver.grid.timesteps[i], i, plans[i])
        x, state = solver.step(state, i, x, v)
    return np.asarray(x)


def stop_after(step: int):
    def callback(i, timestep, latents):
        if i == step:
            raise KeyboardInterrupt

    return callback


class TestRun:
    @pytest.mark.parametrize("name", solver_names())
    def test_equals_the_steps_by_hand(self, name: str) -> None:
        solver = make_solver(name, N, 3.0)
        result = sample(solver)
        assert np.std(result.latents) > 0.1
        np.testing.assert_allclose(result.latents, by_hand(solver), rtol=0, atol=3e-6)
        assert result.latents.dtype == jnp.float32

    def test_two_runs_are_bit_equal_and_the_noise_survives(self) -> None:
        solver = make_solver("unipc", N, 3.0)
        noise = jnp.asarray(NOISE)
        state = start(solver, noise)
        first, second = (sample(solver, state=state) for _ in range(2))
        np.testing.assert_array_equal(first.latents, second.latents)
        np.testing.assert_array_equal(noise, NOISE)
        np.testing.assert_array_equal(state.latents, NOISE)

    def test_one_compilation_a_phase(self) -> None:
        programs = StepPrograms(denoise)
        first = sample(programs=programs)
        assert (first.compilations, first.evaluations) == (2, N)
        assert [r.compile_s > 0 for r in first.records] == [True, False, True, False, False, False]
        # other shift, number of steps and operands: nothing new to compile
        more = make_solver("unipc", 9, 12.0)
        assert sample(more, programs, plans=(DENSE,) * 9, operands={"w": jnp.float32(0.5)}).compilations == 0
        # phases that alternate come back to the same programs
        assert sample(programs=programs, plans=(DENSE, SPARSE) * 3).compilations == 0
        # another solver or another shape is another program
        assert sample(make_solver("euler", N, 3.0), programs).compilations == 2
        solver = make_solver("euler", N, 3.0)
        assert sample(solver, programs, start(solver, NOISE[:1])).compilations == 2
        assert programs.compilations == 6

    def test_operands_change_the_result(self) -> None:
        other = sample(operands={"w": jnp.float32(0.5)})
        assert np.abs(np.asarray(other.latents) - np.asarray(sample().latents)).max() > 0.01

    def test_records(self) -> None:
        solver = make_solver("unipc", N, 3.0)
        records = sample(solver).records
        assert [r.step for r in records] == list(range(N))
        assert [r.plan for r in records] == list(PLANS)
        np.testing.assert_array_equal([r.timestep for r in records], solver.grid.timesteps)
        np.testing.assert_array_equal([r.sigma for r in records], solver.grid.sigmas[:-1])
        assert all(r.seconds > 0 for r in records)
        for i, r in enumerate(records):
            assert type(r.stats.error) is np.ndarray
            np.testing.assert_array_equal(r.stats.error, np.full((2, 4, 3), i))
            assert r.stats.route[0, 0, 0] == len(PLANS[i].segments)

    def test_progress(self) -> None:
        seen = []
        sample(progress=lambda *args: seen.append(args), stage="denoise")
        assert [(stage, step, total) for stage, step, total, _ in seen] == [("denoise", i, N) for i in range(N + 1)]
        times = [t for *_, t in seen]
        assert times[0] == 0
        assert times == sorted(times)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match=r"one plan a step: got 6 plans for 8 steps"):
            sample(make_solver("unipc", 8, 3.0))
        with pytest.raises(ValueError, match="latents stay float32"):
            start(make_solver("unipc", 8, 3.0), NOISE.astype(np.float16))


class TestNonFinite:
    def poisoned(self, at: int, what: str) -> StepPrograms:
        def poison(operands, latents, timestep, step, plan):
            v, stats = denoise(operands, latents, timestep, step, plan)
            bad = jnp.float32({"nan": jnp.nan, "inf": jnp.inf}[what])
            return v.at[1, 2, 3, 4, 5].set(jnp.where(step == at, bad, v[1, 2, 3, 4, 5])), stats

        return StepPrograms(poison)

    @pytest.mark.parametrize("at", [0, 2, N - 1])
    @pytest.mark.parametrize("what", ["nan", "inf"])
    def test_velocity(self, what: str, at: int) -> None:
        done, told = [], []
        with pytest.raises(NonFiniteError, match=rf"denoise step {at + 1} of 6 \(timestep .*predicted velocity") as e:
            sample(
                programs=self.poisoned(at, what),
                callback_on_step_end=lambda step, t, x: done.append(step),
                progress=lambda stage, step, total, s: told.append(step),
            )
        assert (e.value.stage, e.value.step) == ("denoise", at)
        assert done == list(range(at)), "a step ran or was reported after the bad one"
        assert told == list(range(at + 1))

    def test_latents_overflow(self) -> None:
        """A finite velocity can still overflow the solver."""

        def swing(operands, latents, timestep, step, plan):
            v, stats = denoise(operands, latents, timestep, step, plan)
            return jnp.where(step == 1, -3.3e38, jnp.where(step == 2, 3.3e38, v)), stats

        with pytest.raises(NonFiniteError, match=r"refine step 3 of 6 \(timestep .*: the latents hold NaN"):
            sample(programs=StepPrograms(swing), stage="refine")

    def test_initial(self) -> None:
        noise = NOISE.copy()
        noise[0, 0, 0, 0, 0] = np.inf
        with pytest.raises(NonFiniteError, match=r"step 1 of 6 \(before any model call\): the initial latents"):
            start(make_solver("unipc", N, 3.0), noise)

    def test_callback(self) -> None:
        with pytest.raises(NonFiniteError, match=r"step 2 of 6 .*returned by callback_on_step_end"):
            sample(callback_on_step_end=lambda i, t, x: x * np.nan if i == 1 else None)


class TestCallback:
    def test_sees_every_step(self) -> None:
        solver = make_solver("unipc", N, 3.0)
        seen = []
        result = sample(solver, callback_on_step_end=lambda *args: seen.append(args))
        assert [(i, t) for i, t, _ in seen] == list(enumerate(solver.grid.timesteps.tolist()))
        np.testing.assert_array_equal(seen[-1][2], result.latents)
        for _, _, latents in seen:  # kept arrays stay readable: the loop gives away its own, not these
            assert np.isfinite(np.asarray(latents)).all()
        assert len({np.asarray(x).tobytes() for _, _, x in seen}) == N

    def test_watching_changes_nothing(self) -> None:
        watched = sample(callback_on_step_end=lambda i, t, x: None, progress=lambda *a: None)
        np.testing.assert_array_equal(watched.latents, sample().latents)

    def test_replacement(self) -> None:
        """Replaced latents are the next step's input, the solver's history stays: as in diffusers."""
        solver = make_solver("dpm++", N, 3.0)
        replaced = sample(solver, callback_on_step_end=lambda i, t, x: np.asarray(x) * 0.5 if i == 2 else None)
        x = jnp.asarray(NOISE)
        state = solver.init(x)
        for i in range(N):
            v, _ = denoise(OPERANDS, x, solver.grid.timesteps[i], i, PLANS[i])
            x, state = solver.step(state, i, x, v)
            x = x * 0.5 if i == 2 else x
        np.testing.assert_allclose(replaced.latents, x, rtol=0, atol=3e-6)
        assert np.abs(np.asarray(x) - by_hand(solver)).max() > 0.01

    def test_replacement_of_the_last_step_is_the_result(self) -> None:
        result = sample(callback_on_step_end=lambda i, t, x: jnp.zeros_like(x) if i == N - 1 else None)
        assert not np.asarray(result.latents).any()

    def test_wrong_shape(self) -> None:
        with pytest.raises(ValueError, match=r"returned latents of shape \(3,\), expected \(2, 3, 4, 5, 6\)"):
            sample(callback_on_step_end=lambda i, t, x: np.zeros(3))


class TestResume:
    @pytest.mark.parametrize("name", solver_names())
    @pytest.mark.parametrize("step", [0, 3, N - 1])
    def test_bit_equal_through_a_file(self, name: str, step: int, tmp_path) -> None:
        solver = make_solver(name, N, 3.0)
        full = sample(solver)
        with pytest.raises(SamplingInterrupted, match=f"after step {step + 1} of 6") as e:
            sample(solver, callback_on_step_end=stop_after(step))
        assert isinstance(e.value, KeyboardInterrupt)
        assert [r.step for r in e.value.records] == list(range(step + 1))
        path = tmp_path / "run.safetensors"
        request = {"prompt": "ein Büffel 水牛", "steps": N, "seeds": [1, 2]}
        save_state(path, e.value.state, request)
        state, loaded = load_state(path)
        assert loaded == request
        assert state.step == step + 1
        fresh = make_solver(name, N, 3.0)
        resumed = sample(fresh, state=state)
        np.testing.assert_array_equal(resumed.latents, full.latents)
        assert [r.step for r in resumed.records] == list(range(step + 1, N))
        assert resumed.evaluations == N - step - 1
        assert os.listdir(tmp_path) == ["run.safetensors"]

    def test_twice_from_one_state(self) -> None:
        with pytest.raises(SamplingInterrupted) as e:
            sample(callback_on_step_end=stop_after(1))
        first, second = (sample(state=e.value.state) for _ in range(2))
        np.testing.assert_array_equal(first.latents, second.latents)

    @pytest.mark.parametrize(
        "other",
        [("unipc", N, 5.0), ("unipc", N + 1, 3.0), ("unipc_official", N, 3.0), ("euler", N, 3.0), ("dpm++", N, 3.0)],
    )
    def test_another_solver_is_refused(self, other) -> None:
        with pytest.raises(SamplingInterrupted) as e:
            sample(callback_on_step_end=stop_after(1))
        with pytest.raises(ValueError, match="does not belong to this solver"):
            sample(make_solver(*other), state=e.value.state, plans=(DENSE,) * other[1])

    def test_impossible_step(self) -> None:
        state = start(make_solver("unipc", N, 3.0), NOISE)
        with pytest.raises(ValueError, match="does not belong"):
            sample(state=LoopState(N + 1, state.latents, state.solver))

    def test_bad_files(self, tmp_path) -> None:
        with pytest.raises(FileNotFoundError, match="no saved state"):
            load_state(tmp_path / "missing.safetensors")
        path = tmp_path / "run.safetensors"
        state = start(make_solver("unipc", N, 3.0), NOISE)
        save_state(path, state, {})
        whole = path.read_bytes()
        for damaged in (whole[:-5], whole[: len(whole) // 2], b"", b"version https://git-lfs.github.com/spec/v1\n"):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="damaged"):
                load_state(path)
        from safetensors.numpy import save_file

        save_file({"latents": NOISE}, path, {"format": "other"})
        with pytest.raises(ValueError, match="not a saved run"):
            load_state(path)

    def test_a_failed_write_leaves_the_old_file(self, tmp_path) -> None:
        path = tmp_path / "run.safetensors"
        state = start(make_solver("unipc", N, 3.0), NOISE)
        save_state(path, state, {"a": 1})
        with pytest.raises(TypeError):
            save_state(path, state, {"a": object()})
        assert load_state(path)[1] == {"a": 1}


class TestCtrlC:
    def test_signal_stops_between_steps(self) -> None:
        """A real SIGINT in the middle of a step is answered after it, and the run can go on."""
        before = signal.getsignal(signal.SIGINT)

        def interrupted(operands, latents, timestep, step, plan):
            def hit(i):
                if i == 2 and armed:
                    armed.clear()
                    os.kill(os.getpid(), signal.SIGINT)
                return np.float32(0)

            v, stats = denoise(operands, latents, timestep, step, plan)
            return v + jax.pure_callback(hit, jax.ShapeDtypeStruct((), jnp.float32), step), stats

        armed, programs = [True], StepPrograms(interrupted)
        with pytest.raises(SamplingInterrupted, match="after step 3 of 6") as e:
            sample(programs=programs)
        assert signal.getsignal(signal.SIGINT) is before
        resumed = sample(programs=programs, state=e.value.state)
        np.testing.assert_array_equal(resumed.latents, sample(programs=programs).latents)

    def test_second_signal_stops_at_once(self) -> None:
        def twice(i, timestep, latents):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second Ctrl-C did not stop the callback")

        with pytest.raises(SamplingInterrupted, match="after step 1"):
            sample(callback_on_step_end=twice)

    def test_nothing_whole_to_keep(self) -> None:
        """Stopped while the step owned the buffers: no state is pretended."""
        solver = make_solver("unipc", N, 3.0)

        class Broken(StepPrograms):
            def get(self, solver, plan, args):
                args[1].delete()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as e:
            run(Broken(denoise), OPERANDS, solver, PLANS, start(solver, NOISE))
        assert not isinstance(e.value, SamplingInterrupted)

    def test_handler_restored_after_errors_and_other_threads_work(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(ValueError, match="shape"):
            sample(callback_on_step_end=lambda i, t, x: np.zeros(3))
        assert signal.getsignal(signal.SIGINT) is before
        out = []
        thread = threading.Thread(target=lambda: out.append(sample().latents))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(out[0], sample().latents)


def test_saved_request_is_plain_json(tmp_path) -> None:
    from safetensors import safe_open

    path = tmp_path / "run.safetensors"
    save_state(path, start(make_solver("unipc", N, 3.0), NOISE), {"prompt": "a"})
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata["request"]) == {"prompt": "a"}
    assert metadata["step"] == "0"
