"""The stand-in's rules: each one is broken here, and refused."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stand_in import STREAM, RuleBroken, StandInDriver
from stand_in_tensorrt import StandInContext, StandInEngine, StandInTensorRT, Tensor

from eagle3.runtime.gpu.driver import HostBuffer


class Add:
    """cache += sum of x, x int64 [B,N]; y = x + 1."""

    inputs = (Tensor("x", "int64", ("B", "N")), Tensor("past", "int64", ("B", 4)))
    outputs = (Tensor("y", "int64", ("B", "N")), Tensor("present", "int64", ("B", 4)))
    aliases: Mapping[str, str] = {"present": "past"}

    def run(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        arrays["present"][:] = arrays["past"] + arrays["x"].sum()
        arrays["y"][:] = arrays["x"] + 1


class Bench:
    """A context of `Add` with everything set, for N = 3."""

    def __init__(self, *, aliased: bool = True) -> None:
        self.driver = StandInDriver()
        owner = StandInTensorRT(self.driver, {})
        profiles = [{"x": [[1, 1], [1, 3], [1, 3]], "past": [[1, 4]] * 3}]
        self.engine = StandInEngine(owner, Add(), profiles)
        self.buffers = {
            name: self.driver.allocate(64, name) for name in ("x", "past", "y", "present")
        }
        if aliased:
            self.buffers["present"] = self.buffers["past"]
        self.scratch = self.driver.allocate(4096, "scratch")
        self.context = self.ready()

    def ready(self, num_rows: int = 3) -> StandInContext:
        context = self.engine.create_execution_context("user")
        context.set_device_memory(self.scratch.address, self.scratch.num_bytes)
        context.set_optimization_profile_async(0, STREAM)
        context.set_input_shape("x", (1, num_rows))
        context.set_input_shape("past", (1, 4))
        for name, buffer in self.buffers.items():
            context.set_tensor_address(name, buffer.address)
        return context

    def read(self, name: str) -> list[int]:
        values: list[int] = self.driver.memory.view(
            self.buffers[name].address, np.int64, 3
        ).tolist()
        return values


@pytest.fixture
def bench() -> Bench:
    return Bench()


def pinned(driver: StandInDriver, values: list[int]) -> HostBuffer:
    buffer = driver.allocate_host(8 * len(values))
    buffer.view(np.int64)[:] = values
    return buffer


def test_it_computes_in_order_and_only_when_waited_for(bench: Bench) -> None:
    driver, source = bench.driver, pinned(bench.driver, [1, 2, 3])
    driver.upload(bench.buffers["x"].address, source, 24)
    bench.context.execute_async_v3(STREAM)
    result = driver.allocate_host(24)
    driver.download(result, bench.buffers["y"].address, 24)
    assert bench.read("y") == [0, 0, 0] and not result.bytes.any(), "a host that does not wait"
    driver.synchronize()
    assert result.view(np.int64).tolist() == [2, 3, 4]
    assert bench.read("present") == [6, 6, 6]


def test_what_is_overwritten_before_it_was_uploaded_is_lost(bench: Bench) -> None:
    source = pinned(bench.driver, [1, 2, 3])
    bench.driver.upload(bench.buffers["x"].address, source, 24)
    source.view(np.int64)[:] = 9
    bench.driver.synchronize()
    assert bench.read("x") == [9, 9, 9]


def test_a_replay_runs_what_was_captured(bench: Bench) -> None:
    driver, result = bench.driver, bench.driver.allocate_host(24)
    driver.upload(bench.buffers["x"].address, pinned(driver, [1, 0, 0]), 24)
    bench.context.execute_async_v3(STREAM)
    with driver.capture() as graphs:
        bench.context.execute_async_v3(STREAM)
        driver.download(result, bench.buffers["present"].address, 24)
    driver.synchronize()
    assert bench.read("present") == [1, 1, 1], "a capture runs nothing"
    before = driver.counters.copy()
    graphs[0].replay()
    graphs[0].replay()
    driver.synchronize()
    assert result.view(np.int64).tolist() == [3, 3, 3]
    cost = driver.counters.since(before)
    assert (cost.replays, cost.bytes_to_host, cost.synchronizations) == (2, 48, 1)


def test_addresses_must_be_live_aligned_and_large_enough(bench: Bench) -> None:
    context, memory = bench.context, bench.driver.memory
    with pytest.raises(RuleBroken, match="no live allocation"):
        context.set_tensor_address("x", 1 << 20)
    with pytest.raises(RuleBroken, match="not a multiple of 256"):
        context.set_tensor_address("x", bench.buffers["x"].address + 8)
    context.set_tensor_address("x", bench.driver.allocate(16, "too small").address)
    with pytest.raises(RuleBroken, match="24 bytes"):
        context.execute_async_v3(STREAM)
    freed = bench.driver.allocate(64, "freed")
    context.set_tensor_address("x", freed.address)
    memory.free(freed.address)
    with pytest.raises(RuleBroken, match="no live allocation"):
        context.execute_async_v3(STREAM)


def test_a_write_behind_a_buffer_is_found(bench: Bench) -> None:
    own, length = bench.driver.memory._live[bench.buffers["y"].address]
    own[length] = 0
    with pytest.raises(RuleBroken, match="wrote behind"):
        bench.driver.synchronize()


def test_past_and_present_must_be_one_address() -> None:
    with pytest.raises(RuleBroken, match="present and past must be one address"):
        Bench(aliased=False).context.execute_async_v3(STREAM)


def test_two_tensors_may_not_share_an_address(bench: Bench) -> None:
    bench.context.set_tensor_address("y", bench.buffers["x"].address)
    with pytest.raises(RuleBroken, match="two tensors at one address"):
        bench.context.execute_async_v3(STREAM)


def test_shapes_must_lie_in_the_profile(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match=r"x \[1, 4\] is outside profile 0"):
        bench.context.set_input_shape("x", (1, 4))
    fresh = bench.engine.create_execution_context("user")
    with pytest.raises(RuleBroken, match="before a profile"):
        fresh.set_input_shape("x", (1, 3))


@pytest.mark.parametrize("missing", ["shape", "address", "scratch"])
def test_a_call_with_something_missing(bench: Bench, missing: str) -> None:
    context = bench.engine.create_execution_context("user")
    context.set_optimization_profile_async(0, STREAM)
    if missing != "scratch":
        context.set_device_memory(bench.scratch.address, bench.scratch.num_bytes)
    if missing != "shape":
        context.set_input_shape("x", (1, 3))
        context.set_input_shape("past", (1, 4))
    if missing != "address":
        for name, buffer in bench.buffers.items():
            context.set_tensor_address(name, buffer.address)
    with pytest.raises(RuleBroken, match=f"no {missing}"):
        context.execute_async_v3(STREAM)


def test_scratch_memory_must_be_large_enough(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="scratch memory of 64 bytes"):
        bench.context.set_device_memory(bench.buffers["x"].address, 64)
    with pytest.raises(RuleBroken, match="scratch memory of its own"):
        bench.engine.create_execution_context("static")


def test_only_the_drivers_stream_may_run_it(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="another stream"):
        bench.context.execute_async_v3(0)


def test_nothing_is_captured_before_a_warm_up_of_its_shapes(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="before a warm-up"), bench.driver.capture():
        bench.context.execute_async_v3(STREAM)
    bench.context.execute_async_v3(STREAM)
    other = bench.ready(2)
    with pytest.raises(RuleBroken, match="before a warm-up"), bench.driver.capture():
        other.execute_async_v3(STREAM)


@pytest.mark.parametrize("what", ["allocate", "allocate_host", "synchronize", "context", "capture"])
def test_what_a_capture_must_not_hold(bench: Bench, what: str) -> None:
    driver = bench.driver
    actions: dict[str, Any] = {
        "allocate": lambda: driver.allocate(8, "late"),
        "allocate_host": lambda: driver.allocate_host(8),
        "synchronize": driver.synchronize,
        "context": lambda: bench.engine.create_execution_context("user"),
        "capture": lambda: driver.capture().__enter__(),
    }
    with pytest.raises(RuleBroken, match="inside a capture"), driver.capture():
        actions[what]()
    driver.allocate(8, "after it all is well")


def test_a_context_is_not_changed_inside_a_capture(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="changed inside a capture"), bench.driver.capture():
        bench.context.set_input_shape("x", (1, 2))


@pytest.mark.parametrize("change", ["shape", "address", "profile", "scratch", "freed"])
def test_a_graph_is_void_once_its_context_changed(bench: Bench, change: str) -> None:
    context, driver = bench.context, bench.driver
    context.execute_async_v3(STREAM)
    with driver.capture() as graphs:
        context.execute_async_v3(STREAM)
    graphs[0].replay()
    if change == "shape":
        context.set_input_shape("x", (1, 2))
    elif change == "address":
        context.set_tensor_address("y", driver.allocate(64, "moved").address)
    elif change == "profile":
        context.set_optimization_profile_async(0, STREAM)
    elif change == "scratch":
        moved = driver.allocate(4096, "moved")
        context.set_device_memory(moved.address, moved.num_bytes)
    else:
        driver.memory.free(bench.buffers["x"].address)
    with pytest.raises(RuleBroken, match="was changed after|no live allocation"):
        graphs[0].replay()


def test_asynchronous_copies_need_pinned_memory(bench: Bench) -> None:
    pageable = HostBuffer(np.zeros(24, np.uint8))
    with pytest.raises(RuleBroken, match="not pinned"):
        bench.driver.upload(bench.buffers["x"].address, pageable, 24)
    with pytest.raises(RuleBroken, match="not pinned"):
        bench.driver.download(pageable, bench.buffers["x"].address, 24)
    with pytest.raises(RuleBroken, match="no live allocation"):
        bench.driver.upload(bench.buffers["x"].address, pinned(bench.driver, [1] * 99), 8 * 99)


def test_the_device_must_be_current_in_the_thread(bench: Bench) -> None:
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(RuleBroken, match="not current in this thread"):
            other.submit(bench.context.execute_async_v3, STREAM).result()
        other.submit(bench.driver.attach).result()
        other.submit(bench.context.execute_async_v3, STREAM).result()
    with pytest.raises(RuleBroken, match="not current in this thread"):
        bench.driver.synchronize()


def test_a_launch_has_a_possible_size(bench: Bench) -> None:
    kernel = bench.driver.load_kernels(b"", ["advance"])["advance"]
    for blocks, threads in ((0, 32), (1, 0), (1, 2048)):
        with pytest.raises(RuleBroken, match="a launch of"):
            bench.driver.launch(kernel, blocks, threads, [])
