"""Test the command line: output streams, exit statuses and messages."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import call, failed

import eagle3
from eagle3 import cli
from eagle3.plans.tree_paths import STATIC_TREES, TreePaths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime import engine as engine_module
from eagle3.runtime.acceptance import rules
from eagle3.runtime.acceptance.accept import Accepted
from eagle3.runtime.bundle import folder as bundle_module
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.checks import doctor
from eagle3.runtime.checks import verify as checks
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.errors import EngineError, EngineMissing, RequestError
from eagle3.runtime.ort import ort_library
from eagle3.runtime.stats import Stats
from eagle3.runtime.terminal import console
from eagle3.runtime.terminal.conversation import ChatSession, converse
from eagle3.runtime.text.prompt_files import PROMPTS
from eagle3.runtime.trees.tree import Tree


@pytest.fixture
def loaded(engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch) -> eagle3.Engine:
    """Let commands use the engine of the test session instead of loading the bundle again."""
    monkeypatch.setattr(engine_module, "load", lambda *_, **__: engine)
    return engine


# The program itself


def test_help_is_instant_and_imports_no_engine() -> None:
    code = (
        "import sys; from eagle3.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'numpy', 'onnxruntime', 'torch', 'transformers', 'jinja2', 'tokenizers'}\n"
        "print('heavy', heavy & set(sys.modules)); sys.exit(code)"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        times.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "heavy set()" in done.stdout
    print(f"eagle3 --help: {min(times):.3f} s")
    assert min(times) < 0.5


@pytest.mark.parametrize("command", sorted(cli.main.commands))
def test_every_help_works_without_engine_or_torch(command: str) -> None:
    code = (
        "import sys\n"
        "for name in ('onnxruntime', 'torch', 'transformers', 'onnx_ir'):\n"
        "    sys.modules[name] = None\n"
        f"from eagle3.cli import main; main([{command!r}, '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_help_names_the_defaults_of_the_engine() -> None:
    """The help texts repeat them, because `--help` must not import the engine."""
    defaults = inspect.signature(eagle3.Engine.stream).parameters
    options = [each for each in cli.main.commands["run"].params if isinstance(each, click.Option)]
    helps = {str(each.name): each.help or "" for each in options}
    assert f"[default: {defaults['acceptance'].default}]" in helps["acceptance"]
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in ("max_new_tokens", "temperature", "seed", *penalties):
        assert f"[default: {defaults[name].default:g}" in helps[name]
    text = " ".join(call("verify", "--help").stdout.split())
    assert f"[default: {checks.MAX_NEW_TOKENS}]" in text
    assert f"[default: {len(PROMPTS)} built-in prompts]" in text


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.cli", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"eagle3, version {eagle3.__version__}\n")


def test_a_closed_pipe_is_quiet(bundle: Bundle) -> None:
    words = [sys.executable, "-m", "eagle3.cli", "run", str(bundle.root), "t3", "--threads", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


# Errors


@pytest.mark.parametrize("command", ["run", "chat", "verify", "inspect"])
def test_a_folder_that_is_no_bundle(command: str, tmp_path: Path) -> None:
    result = call(command, tmp_path, stdin="hello")
    failed(result, 1, "error: ", "is not a bundle")
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_no_engine_package(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    failed(call("run", bundle.root, "t3"), 1, "error: no engine package", "eagle3[cpu]")


def test_an_error_of_several_lines_is_one(
    loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*_: Any, **__: Any) -> Iterator[eagle3.Chunk]:
        raise EngineError("engine 'target' failed:\n  out of\n  memory")

    monkeypatch.setattr(loaded, "stream", stream)
    result = call("run", "b", "t3")
    failed(result, 1)
    assert result.stderr == "error: engine 'target' failed: out of memory\n"


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "b", "t3", "--nonsense"],
        ["run", "b", "t3", "--acceptance", "typical"],
        ["run", "b", "t3", "--logit-bias", "3"],
        ["run", "b", "t3", "--logit-bias", "x=1"],
        ["run", "b", "t3", "--no-draft", "--drafter", "eagle3"],
        ["run", "b", "t3", "--logprobs", "2"],
        ["export", "--target", "x", "--draft", "none"],
        ["export", "--target", "x", "--draft", "none", "-o", "y", "--aux-layers", "1;2"],
        ["export", "--target", "x", "--draft", "none", "-o", "y", "--dtype", "int3"],
        ["verify", "b", "--num-prompts", "0"],
    ],
)
def test_wrong_usage_exits_2(words: list[str]) -> None:
    failed(call(*words), 2, "Usage: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--drafter", "medusa"], "drafter 'medusa' is unknown"),
        (["--num-draft-tokens", "99"], "max_draft_tokens is 32"),
        (["--max-new-tokens", "0"], "max_new_tokens must be an integer of at least 1, got 0"),
        (["--logit-bias", "64=1"], "the vocabulary has 64"),
        (["--compare", "--no-draft"], "nothing to compare"),
        (["--stop", ""], "stop"),
    ],
)
def test_requests_that_cannot_be_served_exit_1(
    loaded: eagle3.Engine, words: list[str], says: str
) -> None:
    failed(call("run", "b", "t3", *words), 1, "error: ", says)


# run


def test_run_streams_to_stdout_and_counts_on_stderr(loaded: eagle3.Engine) -> None:
    result = call("run", "b", "t3 t5", "--max-new-tokens", "12")
    expected = loaded.generate("t3 t5", max_new_tokens=12)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    assert f"{len(expected.token_ids)} tokens (" in result.stderr
    assert "tau " in result.stderr and "accepted by position" in result.stderr


def test_the_prompt_comes_from_stdin(loaded: eagle3.Engine) -> None:
    as_argument = call("run", "b", "t3 t5", "--raw", "--json", "--max-new-tokens", "5")
    as_input = call("run", "b", "--raw", "--json", "--max-new-tokens", "5", stdin="t3 t5\n")
    assert as_argument.exit_code == as_input.exit_code == 0
    first, second = json.loads(as_argument.stdout), json.loads(as_input.stdout)
    assert first["prompt_tokens"] == second["prompt_tokens"] == 2
    assert first["token_ids"] == second["token_ids"]


def test_stdin_that_is_no_utf8(loaded: eagle3.Engine) -> None:
    failed(call("run", "b", stdin=b"\xff\xfe"), 1, "not UTF-8")


@pytest.mark.parametrize("command", ["run", "chat"])
def test_stdin_that_is_closed(command: str) -> None:
    words = shlex.join([sys.executable, "-m", "eagle3.cli", command, "b"])
    done = subprocess.run(["sh", "-c", f"{words} <&-"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: stdin is closed") and done.stderr.count("\n") == 1


def test_json_is_all_there_is_on_stdout(loaded: eagle3.Engine) -> None:
    result = call("run", "b", "t3", "--json", "--max-new-tokens", "4", "--logprobs", "2")
    data = json.loads(result.stdout)
    assert set(data) == {
        "text",
        "token_ids",
        "prompt_tokens",
        "finish_reason",
        "stats",
        "logprobs",
    }
    assert len(data["logprobs"]) == len(data["token_ids"])
    assert len(data["logprobs"][0]["top"]) == 2
    assert data["stats"]["rounds"] >= 1


def test_every_option_reaches_the_engine(
    loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    stream = loaded.stream

    def spied(prompt: Any, **options: Any) -> Iterator[eagle3.Chunk]:
        seen.update(options, prompt=prompt)
        return stream(prompt, **options)

    monkeypatch.setattr(loaded, "stream", spied)
    given = (
        "--max-new-tokens 3 --temperature 0.5 --top-k 9 --top-p 0.9 --min-p 0.01"
        " --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3"
        " --logit-bias 4=-100 --logit-bias 5=1.5 --seed 7 --acceptance coupled --stop t8"
        " --stop t9 --drafter eagle3 --draft-top-k 2 --draft-depth 2 --num-draft-tokens 4"
        " --logprobs 1 --json --raw"
    )
    assert call("run", "b", "t3 t5", *given.split()).exit_code == 0
    del seen["cancel"]
    assert seen == {
        "prompt": "t3 t5",
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {4: -100.0, 5: 1.5},
        "seed": 7,
        "acceptance": "coupled",
        "stop": ("t8", "t9"),
        "drafter": "eagle3",
        "draft_top_k": 2,
        "draft_depth": 2,
        "num_draft_tokens": 4,
        "logprobs": 1,
        "chat": False,
    }


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_tree_by_name_or_from_a_file(
    loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    seen: list[TreePlan] = []
    propose = EagleDrafter.propose

    def spied(self: EagleDrafter, request: DraftRequest) -> Tree:
        seen.append(request.tree)
        return propose(self, request)

    monkeypatch.setattr(EagleDrafter, "propose", spied)
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    words = (command, "b", *(["t3"] if command == "run" else ["--num-prompts", "1"]))
    for tree, paths in (("eagle1", STATIC_TREES["eagle1"]), (file, ((0,), (1,), (0, 0)))):
        seen.clear()
        result = call(*words, "--tree", tree, "--max-new-tokens", "12")
        assert result.exit_code == 0, result.output
        expected = paths if isinstance(paths, TreePaths) else TreePaths(paths)
        assert expected in [each.static for each in seen]
    assert call(*words, "--tree", "dynamic", "--max-new-tokens", "4").exit_code == 0
    failed(call(*words, "--tree", "medusa"), 1, "tree 'medusa' not found: use one of")
    file.write_text("[[1]]")
    failed(call(*words, "--tree", file), 1, "tree.json: path [1] of the static tree")


def test_no_draft_is_plain_decoding(loaded: eagle3.Engine) -> None:
    result = call("run", "b", "t3", "--no-draft", "--json", "--max-new-tokens", "6")
    stats = json.loads(result.stdout)["stats"]
    assert stats["rounds"] == stats["plain_rounds"]
    assert "tau" not in result.stderr


def test_show_prompt_is_the_rendered_one(loaded: eagle3.Engine) -> None:
    result = call("run", "b", "t3 t5", "--show-prompt", "--max-new-tokens", "2")
    assert result.stderr.splitlines()[0] == loaded.render("t3 t5")
    raw = call("run", "b", "t3 t5", "--show-prompt", "--raw", "--max-new-tokens", "2")
    assert raw.stderr.splitlines()[0] == "t3 t5"


def test_compare_says_equal(loaded: eagle3.Engine) -> None:
    result = call("run", "b", "t3 t5", "--compare", "--max-new-tokens", "16")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == loaded.generate("t3 t5", max_new_tokens=16).text
    assert lines[-1] == "token-equal: yes"
    for part in ("plain: ", "speculative: ", "speedup: ", "tau: ", "prefill", "python overhead"):
        assert part in result.stdout


def test_compare_as_json(loaded: eagle3.Engine) -> None:
    result = call("run", "b", "t3", "--compare", "--json", "--max-new-tokens", "8")
    data = json.loads(result.stdout)
    assert data["compare"]["token_equal"] and data["compare"]["token_equality_promised"]
    assert data["compare"]["plain"]["token_ids"] == data["token_ids"]
    assert data["compare"]["speedup"] > 0


def test_compare_fails_when_tokens_differ(
    loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_first_child(tree: Any, choose: Any) -> Accepted:
        children = tree.children(0)
        return Accepted(children[:1], choose(children[0] if children else 0))

    monkeypatch.setattr(rules, "accept_by_token", accept_first_child)
    result = call("run", "b", "t3 t5", "--compare", "--max-new-tokens", "16")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "token-equal: no"


def test_compare_promises_no_tokens_under_rejection(loaded: eagle3.Engine) -> None:
    words = ("run", "b", "t3", "--compare", "--temperature", "1", "--max-new-tokens", "24")
    sampled = call(*words)
    assert sampled.exit_code == 0
    assert "not promised" in sampled.stdout
    coupled = call(*words, "--acceptance", "coupled")
    assert coupled.stdout.splitlines()[-1] == "token-equal: yes"


def interrupt_after_first_chunk(engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send Ctrl-C while the answer is generated, after its first text was shown."""
    stream = engine.stream

    def interrupted(*args: Any, **options: Any) -> Iterator[eagle3.Chunk]:
        for index, chunk in enumerate(stream(*args, **options)):
            yield chunk
            if index == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(engine, "stream", interrupted)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_ctrl_c_keeps_what_was_generated(
    loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    interrupt_after_first_chunk(loaded, monkeypatch)
    result = call("run", "b", "t3 t5", "--max-new-tokens", "90", *more)
    failed(result, 130)
    text = json.loads(result.stdout)["text"] if more else result.stdout.strip()
    monkeypatch.undo()
    whole = loaded.generate("t3 t5", max_new_tokens=90).text
    assert text and text != whole and whole.startswith(text)
    assert "(cancelled)" in result.stderr


def test_a_second_ctrl_c_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), console.interruptible() as cancel:
        os.kill(os.getpid(), signal.SIGINT)
        assert cancel.wait(5)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_statistics_name_a_wiring_fault_and_a_fall_back() -> None:
    bad = Stats(rounds=20, plain_rounds=4, accepted_by_position=(0.05,), fell_back=True)
    fault, fallen = console.warnings(bad)
    assert "only 5.0% of the first draft tokens" in fault and "wiring fault" in fault
    assert "4 of 20 rounds were plain" in fallen
    assert "wiring" not in " ".join(console.warnings(replace(bad, drafter="lookup")))
    few = Stats(rounds=4, accepted_by_position=(0.0,))
    good = Stats(rounds=20, accepted_by_position=(0.5,))
    assert console.warnings(few) == console.warnings(good) == []


# chat


def test_chat_remembers_until_reset(loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stream = loaded.stream

    def spied(prompt: Any, **options: Any) -> Iterator[eagle3.Chunk]:
        if isinstance(prompt[0], dict):
            seen.append([dict(message) for message in prompt])
        return stream(prompt, **options)

    monkeypatch.setattr(loaded, "stream", spied)
    lines = "t3\n\nt5\n/reset\nt7\n/exit\nt9\n"
    result = call("chat", "b", "--max-new-tokens", "3", "--system", "t2", stdin=lines)
    assert result.exit_code == 0, result.output
    assert [[m["role"] for m in messages] for messages in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert result.stdout.splitlines()[0] == seen[1][2]["content"]
    assert "was cleared" in result.stderr


def test_chat_refuses_a_bad_option_before_any_question(loaded: eagle3.Engine) -> None:
    result = call("chat", "b", "--temperature", "-1", stdin="t3\n")
    assert result.exit_code == 1 and result.stdout == ""
    assert "temperature is -1.0" in result.stderr


def test_chat_drops_the_oldest_turns_and_says_so(engine: eagle3.Engine) -> None:
    notes: list[str] = []
    talk = ChatSession(engine, notes.append, system="t2", max_new_tokens=20)
    for _ in range(6):
        talk.say(" ".join(["t5"] * 20), lambda _: None)
    assert any("oldest 1 turn(s) were dropped" in note for note in notes)
    roles = [message["role"] for message in talk.messages]
    assert roles[:2] == ["system", "user"] and roles[-1] == "assistant"
    assert len(engine.encode(talk.messages[:-1])) + 20 <= engine.plan.max_seq_len


def test_chat_goes_on_after_a_question_that_is_too_long(loaded: eagle3.Engine) -> None:
    lines = " ".join(["t5"] * 200) + "\nt3\n"
    result = call("chat", "b", "--max-new-tokens", "2", stdin=lines)
    assert result.exit_code == 0
    assert "error: the prompt has 20" in result.stderr
    assert result.stdout.strip()


def test_chat_goes_on_after_a_line_that_is_no_utf8(loaded: eagle3.Engine) -> None:
    result = call("chat", "b", "--max-new-tokens", "2", stdin=b"t3 \xff\nt3\n")
    assert result.exit_code == 0, result.output
    assert "error: the line is not UTF-8" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_chat_goes_on_after_a_question_that_cannot_be_encoded(engine: eagle3.Engine) -> None:
    notes: list[str] = []
    talk = ChatSession(engine, notes.append, max_new_tokens=2)
    converse(talk, iter(["t3 \udcff", "t3"]), lambda _: None, notes.append)
    assert notes[0].startswith("error: the prompt cannot be encoded")
    assert [message["content"] for message in talk.messages][0] == "t3"


def test_a_terminal_line_that_is_no_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    typed: Iterator[Any] = iter([bad, "t3", EOFError()])

    def read() -> str:
        line = next(typed)
        if isinstance(line, Exception):
            raise line
        return str(line)

    notes: list[str] = []
    assert list(console._lines(read, notes.append)) == ["t3"]
    assert "not UTF-8" in notes[0] and notes[1:] == [""]


def test_ctrl_c_in_chat_keeps_the_part_of_the_answer(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after_first_chunk(engine, monkeypatch)
    shown: list[str] = []
    talk = ChatSession(engine, lambda _: None, max_new_tokens=60)
    talk.say("t3 t5", shown.append)
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(shown).strip("\n")}
    assert talk.messages[-1]["content"]


def test_ctrl_c_at_the_prompt_ends_chat(
    loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(note: Any) -> Iterator[str]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(console, "typed_lines", lines)
    failed(call("chat", "b"), 130)


def test_chat_needs_a_template(engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "chat_template", None)
    with pytest.raises(RequestError, match="--raw"):
        ChatSession(engine, lambda _: None)


# verify, inspect, doctor


def test_verify_passes_and_reports(
    loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("t3 t5\nt7\nt9\n")
    monkeypatch.setitem(checks.verify.__kwdefaults__, "num_walks", 200)
    words = ("verify", "b", "--prompts", file, "--num-prompts", "1", "--max-new-tokens", "4")
    result = call(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "verify: passed"
    assert "prompt 1 of 1" in result.stderr


def test_verify_exits_1_on_failure(loaded: eagle3.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_first_child(tree: Any, choose: Any) -> Accepted:
        children = tree.children(0)
        return Accepted(children[:1], choose(children[0] if children else 0))

    monkeypatch.setattr(rules, "accept_by_token", accept_first_child)
    monkeypatch.setitem(checks.verify.__kwdefaults__, "num_walks", 10)
    result = call("verify", "b", "--num-prompts", "2", "--max-new-tokens", "12", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["passed"] is False
    assert any(each["divergences"] for each in data["equality"])


def test_inspect_in_words_and_as_json(bundle: Bundle) -> None:
    words = call("inspect", bundle.root, "--hashes")
    assert words.exit_code == 0
    assert "EAGLE-3 head" in words.stdout and "SHA-256" in words.stderr
    data = json.loads(call("inspect", bundle.root, "--json").stdout)
    assert data["plan"]["tree"]["num_draft_tokens"] == 6


def test_inspect_finds_an_altered_file(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a file that is too large to be hashed every time the bundle is opened."""
    monkeypatch.setattr(bundle_module, "MAX_SMALL_BYTES", 0)
    for path in bundle.root.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    altered = bytearray((tmp_path / "target.onnx").read_bytes())
    altered[-1] ^= 1
    (tmp_path / "target.onnx").write_bytes(altered)
    assert call("inspect", tmp_path).exit_code == 0
    failed(call("inspect", tmp_path, "--hashes"), 1, "is not the exported file")


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("doctor").exit_code == 0
    assert json.loads(call("doctor", "--json").stdout)["can_run"] is True

    def missing() -> Any:
        raise EngineMissing("no engine package is installed: pip install 'eagle3[cpu]'")

    monkeypatch.setattr(ort_library, "import_onnxruntime", missing)
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    result = call("doctor")
    assert result.exit_code == 1
    assert "eagle3[cpu]" in result.stdout


def test_commands_are_those_that_were_promised() -> None:
    assert isinstance(cli.main, click.Group)
    stages = {"export", "run", "chat", "verify", "inspect", "doctor", "train", "plan", "build"}
    assert set(cli.main.commands) == stages
