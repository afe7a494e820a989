"""kernels.cu: it compiles for every GPU the presets name, and does what its numpy version does."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from cuda_on_host import COMPILER, compile_for_host
from numpy.typing import NDArray
from numpy_kernels import NumpyKernels
from stand_in import Memory

from eagle3.runtime.errors import DeviceError
from eagle3.runtime.gpu.kernels import KERNELS, compile_kernels
from eagle3.runtime.trees.tree import Tree

with_nvrtc = pytest.mark.skipif(find_spec("cuda") is None, reason="needs cuda-bindings")
with_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
THREADS = 32


@with_nvrtc
@pytest.mark.parametrize("capability", ["7.5", "8.7", "8.9", "9.0", "11.0", "12.0"])
def test_nvrtc_compiles_the_kernels_without_a_gpu(capability: str) -> None:
    image = compile_kernels(capability)
    assert image.startswith(b"\x7fELF")
    assert all(name.encode() in image for name in KERNELS)


@with_nvrtc
def test_a_gpu_that_nvrtc_does_not_know_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"sm_42.*upgrade nvidia-cuda-nvrtc"):
        compile_kernels("4.2")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., None]]:
    return compile_for_host(tmp_path_factory.mktemp("kernels"))


class Twice:
    """The same arrays in two memories, for the two versions of a kernel."""

    def __init__(self, **arrays: Any) -> None:
        self.memories = (Memory(), Memory())
        self._shapes = {name: np.asarray(array) for name, array in arrays.items()}
        self.addresses: list[dict[str, int]] = []
        for memory in self.memories:
            own = {}
            for name, array in self._shapes.items():
                own[name] = memory.allocate(array.nbytes)
                memory.view(own[name], array.dtype, array.size)[:] = array.ravel()
            self.addresses.append(own)

    def table(self, name: str, *caches: str) -> None:
        """The array `name` holds the addresses of the others, in either memory its own."""
        for memory, own in zip(self.memories, self.addresses, strict=True):
            memory.view(own[name], np.int64, len(caches))[:] = [own[cache] for cache in caches]

    def array(self, which: int, name: str) -> NDArray[Any]:
        array = self._shapes[name]
        view = self.memories[which].view(self.addresses[which][name], array.dtype, array.size)
        return view.reshape(array.shape)

    def run(
        self,
        compiled: dict[str, Callable[..., None]],
        name: str,
        *arguments: str | int,
        blocks: int = 1,
        threads: int = THREADS,
        differ: tuple[str, ...] = (),
    ) -> None:
        """Runs both and compares every array but those named in `differ`."""
        given = [[a if isinstance(a, int) else own[a] for a in arguments] for own in self.addresses]
        getattr(NumpyKernels(self.memories[0]), name)(blocks, *given[0])
        compiled[name](blocks, threads, *given[1])
        for array in set(self._shapes) - set(differ):
            np.testing.assert_array_equal(self.array(1, array), self.array(0, array), err_msg=array)
        for memory in self.memories:
            memory.check_guards()


def random_tree(rng: np.random.Generator, size: int, vocab_size: int) -> Tree:
    parents, tokens = [-1], [int(rng.integers(vocab_size))]
    for node in range(1, size):
        parents.append(int(rng.integers(max(0, node - 4), node)))
        siblings = {tokens[i] for i, parent in enumerate(parents[:node]) if parent == parents[node]}
        tokens.append(int(rng.choice([t for t in range(vocab_size) if t not in siblings])))
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int32))


def placed(rng: np.random.Generator, width: int, room: int, limit: int, size: int) -> Twice:
    """The arguments of place_tree, for a tree of `size` nodes in buffers for `room`."""
    tree = random_tree(rng, size, 9)
    tokens, parents = np.full(room, 77), np.zeros(room, np.int64)
    tokens[:size], parents[:size] = tree.tokens, tree.parents
    return Twice(
        tokens=tokens,
        parents=parents,
        num_nodes=np.array([size]),
        node_limit=np.array([limit]),
        root=np.array([5]),
        past_len=np.array([40]),
        input_ids=np.full(width, -9),
        position_ids=np.full(width, -9),
        tree_mask=np.full((width, width), 7, np.uint8),
        num_used=np.array([-9]),
    )


PLACE = ("tokens", "parents", "num_nodes", "node_limit", "root", "past_len")
OUTPUTS = ("input_ids", "position_ids", "tree_mask", "num_used")


@with_compiler
@pytest.mark.parametrize("seed", range(20))
def test_place_tree(compiled: dict[str, Callable[..., None]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, width, limit = (int(n) for n in rng.integers(1, 40, 3))
    case = placed(rng, width, 40, limit, size)
    tree = Tree(case.array(0, "tokens")[:size], case.array(0, "parents")[:size].astype(np.int32))
    blocks = -(-width // THREADS)
    case.run(compiled, "place_tree", *PLACE, 100, width, *OUTPUTS, blocks=blocks)
    used = int(case.array(1, "num_used")[0])
    assert used == min(size, width, limit)
    mask = case.array(1, "tree_mask")
    np.testing.assert_array_equal(mask[:used, :used], tree.ancestor_mask()[:used, :used])
    np.testing.assert_array_equal(mask[used:], np.eye(width)[used:])
    np.testing.assert_array_equal(mask[:used, used:], 0)
    np.testing.assert_array_equal(case.array(1, "position_ids")[:used], 40 + tree.depths[:used])
    assert case.array(1, "input_ids")[0] == 5


@with_compiler
@pytest.mark.parametrize("name", ["num_nodes", "node_limit"])
def test_a_tree_of_no_nodes_is_its_root(
    compiled: dict[str, Callable[..., None]], name: str
) -> None:
    case = placed(np.random.default_rng(1), 4, 12, 12, 12)
    for which in (0, 1):
        case.array(which, name)[0] = 0
    case.run(compiled, "place_tree", *PLACE, 9, 4, *OUTPUTS)
    assert case.array(1, "num_used")[0] == 1
    assert case.array(1, "input_ids").tolist() == [5, 0, 0, 0]


@with_compiler
@pytest.mark.parametrize("bad", [-1, 9, 1 << 40])
def test_a_tree_ends_before_a_token_that_is_none(
    compiled: dict[str, Callable[..., None]], bad: int
) -> None:
    case = placed(np.random.default_rng(1), 12, 12, 12, 12)
    for which in (0, 1):
        case.array(which, "tokens")[7] = bad
    case.run(compiled, "place_tree", *PLACE, 9, 12, *OUTPUTS)
    assert case.array(1, "num_used")[0] == 7


@with_compiler
@pytest.mark.parametrize("seed", range(30))
def test_accept_greedy(compiled: dict[str, Callable[..., None]], seed: int) -> None:
    from eagle3.runtime.acceptance.accept import accept_by_token

    rng = np.random.default_rng(seed)
    size, width = int(rng.integers(1, 30)), 32
    tree = random_tree(rng, size, 5)
    next_token = rng.integers(0, 5, width)
    ids, parents, positions = (np.full(width, n) for n in (-3, 0, 40))
    ids[:size], parents[:size], positions[:size] = tree.tokens, tree.parents, 40 + tree.depths
    greedy, spoiled = seed % 5 != 0, seed % 7 == 3
    if spoiled:
        next_token[int(rng.integers(size))] = -1
    case = Twice(
        input_ids=ids,
        parents=parents,
        position_ids=positions,
        next_token=next_token,
        num_used=np.array([size]),
        greedy=np.array([int(greedy)]),
        chosen=np.full(2 + width, -9),
        result=np.full(5 + width, -9),
    )
    names = ("input_ids", "parents", "position_ids", "next_token", "num_used", "greedy")
    case.run(compiled, "accept_greedy", *names, "chosen", "result", blocks=2)
    head = case.array(1, "result")[:5].tolist()
    if spoiled or not greedy:
        assert head == [int(spoiled), 0, -1, int(tree.depths.max()), size]
        return
    expected = accept_by_token(tree, lambda node: int(next_token[node]))
    kept = len(expected.path) + 1
    assert head == [0, kept, expected.token, int(tree.depths.max()), size]
    assert case.array(1, "chosen")[:2].tolist() == [kept, expected.token]
    assert tuple(case.array(1, "chosen")[3 : 2 + kept]) == expected.path
    path_tokens = [tree.token_list[node] for node in expected.path]
    assert case.array(1, "result")[6 : 5 + kept].tolist() == path_tokens


def caches(rng: np.random.Generator, chosen: list[int], past: int) -> Twice:
    shape = (2, 24, 5)
    case = Twice(
        a=rng.integers(0, 1 << 30, shape).astype(np.uint32),
        b=rng.integers(0, 1 << 30, shape).astype(np.uint32),
        untouched=rng.integers(0, 1 << 30, shape).astype(np.uint32),
        table=np.zeros(2, np.int64),
        past_len=np.array([past]),
        chosen=np.array(chosen),
    )
    case.table("table", "a", "b")
    return case


@with_compiler
@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [0, 2, 3, 9], [0, 1, 5, 6, 7], [0, 3]])
def test_keep_kv(compiled: dict[str, Callable[..., None]], path: list[int]) -> None:
    case = caches(np.random.default_rng(0), [len(path), 4, *path, 0, 0], 10)
    before = case.array(1, "a").copy()
    where = ("table", 2, 24, 5, "past_len", "chosen")
    case.run(compiled, "keep_kv", *where, blocks=4, threads=3, differ=("table",))
    found = case.array(1, "a")
    np.testing.assert_array_equal(found[:, 10 : 10 + len(path)], before[:, [10 + n for n in path]])
    np.testing.assert_array_equal(found[:, :10], before[:, :10])
    np.testing.assert_array_equal(found[:, 10 + len(path) :], before[:, 10 + len(path) :])


@with_compiler
@pytest.mark.parametrize(("past", "count"), [(0, 3), (10, 4), (22, 9), (24, 1)])
def test_clear_kv(compiled: dict[str, Callable[..., None]], past: int, count: int) -> None:
    case = caches(np.random.default_rng(0), [0, 0], past)
    before = case.array(1, "b").copy()
    where = ("table", 2, 24, 5, "past_len")
    case.run(compiled, "clear_kv", *where, count, blocks=4, threads=3, differ=("table",))
    found = case.array(1, "b")
    assert not found[:, past : past + count].any()
    np.testing.assert_array_equal(found[:, past + count :], before[:, past + count :])
    np.testing.assert_array_equal(found[:, :past], before[:, :past])


@with_compiler
@pytest.mark.parametrize(
    ("path", "first", "waiting", "capacity"),
    [([0, 2, 5], 0, 0, 8), ([0], 0, 3, 8), ([0, 1, 4, 6], 0, 6, 8), ([0, 1, 2, 3], 2, 0, 2)],
)
def test_feed_draft_and_count(
    compiled: dict[str, Callable[..., None]],
    path: list[int],
    first: int,
    waiting: int,
    capacity: int,
) -> None:
    rng = np.random.default_rng(0)
    case = Twice(
        features=rng.integers(0, 1 << 30, (8, 9)).astype(np.uint32),
        layers=np.array([2, 0]),
        input_ids=np.arange(100, 108),
        chosen=np.array([len(path), 55, *path]),
        draft_rows=np.array([waiting]),
        draft_features=np.zeros((8, 6), np.uint32),
        draft_next_ids=np.zeros(8, np.int64),
    )
    sources = ("features", 9, "layers", 2, 3, "input_ids", "chosen", first)
    where = ("draft_rows", capacity, "draft_features", "draft_next_ids")
    case.run(compiled, "feed_draft", *sources, *where, blocks=len(path), threads=2)
    fed = min(len(path) - first, capacity - waiting)
    rows = path[first : first + fed]
    expected = case.array(0, "features")[rows][:, [6, 7, 8, 0, 1, 2]]
    np.testing.assert_array_equal(case.array(1, "draft_features")[waiting:][:fed], expected)
    ids = [*(100 + node for node in path[1:]), 55][first : first + fed]
    assert case.array(1, "draft_next_ids")[waiting : waiting + fed].tolist() == ids
    assert not case.array(1, "draft_next_ids")[waiting + fed :].any()
    case.run(compiled, "count_fed", "chosen", first, capacity, "draft_rows")
    assert case.array(1, "draft_rows")[0] == waiting + fed
    case.run(compiled, "count_fed", "chosen", len(path) + 3, capacity, "draft_rows")
    assert case.array(1, "draft_rows")[0] == waiting + fed


@with_compiler
@pytest.mark.parametrize("count", [0, 3])
def test_advance_and_draft_done(compiled: dict[str, Callable[..., None]], count: int) -> None:
    case = Twice(
        chosen=np.array([count, 8]),
        past_len=np.array([10]),
        root=np.array([1]),
        draft_past_len=np.array([9]),
        draft_rows=np.array([2]),
    )
    case.run(compiled, "advance", "chosen", "past_len", "root", blocks=2)
    assert (case.array(1, "past_len")[0], case.array(1, "root")[0]) == (
        (13, 8) if count else (10, 1)
    )
    case.run(compiled, "draft_done", "draft_past_len", "draft_rows", blocks=2)
    assert (case.array(1, "draft_past_len")[0], case.array(1, "draft_rows")[0]) == (11, 0)
