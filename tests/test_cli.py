"""The command line: what it prints, and how it ends."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import whence
from whence import Program
from whence.cli import FAILED, OK, USAGE, main
from whence.cli.programs import program_of
from whence.demo import GPT, GPTConfig
from whence.models import called

TINY_BERT = (
    "hf:BertForMaskedLM(num_hidden_layers=2, hidden_size=32, intermediate_size=64, "
    "num_attention_heads=4, vocab_size=60, max_position_embeddings=16)"
)


_of_a_model = cache(program_of)


@pytest.fixture(autouse=True)
def _captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What several tests look at is captured for the first of them."""

    def program(name: str, *, backward: bool) -> Program:
        return (_of_a_model if name == TINY_BERT else program_of)(name, backward=backward)

    monkeypatch.setattr("whence.cli.looking.program_of", program)


def written(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module `mine` where the command is run."""
    (folder / "mine.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def small_gpt() -> tuple[GPT, tuple[torch.Tensor, ...]]:
    """The demonstration with less to do."""
    return GPT(GPTConfig(16, 4, 8, 2, 2)), (torch.arange(4)[None],)


def test_demo_as_json_says_that_everything_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demonstration is plain data, too, and leaves a page."""
    monkeypatch.setattr("whence.cli.trusting.gpt", small_gpt)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["verification"]["ok"] is True
    assert data["rows"][1]["type"] == "GPT"
    assert data["page"] == str(tmp_path / "whence-demo.html")
    assert (tmp_path / "whence-demo.html").exists()


def test_demo_says_where_its_page_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it was started, in one line that a terminal takes for a link."""
    monkeypatch.setattr("whence.cli.trusting.gpt", small_gpt)
    folder = tmp_path / f"a folder with a {'long ' * 20}name"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["demo"]) == OK
    line = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert line == f"see it: open {(folder / 'whence-demo.html').as_uri()} in a browser"


def test_demo_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is in the temporary folder then."""
    monkeypatch.setattr("whence.cli.trusting.gpt", small_gpt)
    (tmp_path / "whence-demo.html").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["demo"]) == OK
    line = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert Path(line.removeprefix("see it: open ").removesuffix(" in a browser")).name == "whence-GPT.html"


def test_view_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named for the model's class, or as asked; as data it says where, and how large."""
    monkeypatch.chdir(tmp_path)
    assert main(["view", TINY_BERT]) == OK
    assert capsys.readouterr().out.startswith("whence-BertForMaskedLM.html (")
    other = TINY_BERT.replace("hidden_size=32", "hidden_act='relu', hidden_size=32")
    assert main(["view", TINY_BERT, "--forward", "--other", other, "--html", "both.html", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["path"] == "both.html"
    assert data["bytes"] == (tmp_path / "both.html").stat().st_size
    assert data["nodes"] > data["calls"] > 10


def test_a_page_that_cannot_be_written_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which file, and why."""
    monkeypatch.chdir(tmp_path)
    assert main(["view", TINY_BERT, "--forward", "--html", "nowhere/page.html"]) == USAGE
    assert "nowhere/page.html cannot be written: No such file or directory" in capsys.readouterr().err


def test_show_counts_operations_of_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    """The tree has forward and backward counts, as deep as asked."""
    assert main(["show", TINY_BERT, "--backward", "--depth", "2"]) == OK
    page = capsys.readouterr().out
    assert "bert" in page
    assert "bert.encoder.layer.0" not in page
    assert "gradient" in page


def test_show_selects_operations_with_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    """A selection lists operations and says where they come from."""
    assert main(["show", TINY_BERT, "--select", "**.attention :: aten.linear", "--json"]) == OK
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert all(".attention" in row["calls"][0] and row["phase"] == "forward" for row in rows)


def test_a_pattern_that_fits_nothing_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """It says what there is, and ends with 2."""
    assert main(["show", TINY_BERT, "--select", "bert.encodr"]) == USAGE
    assert "bert.encoder" in capsys.readouterr().err


MOODY = (
    "import torch\n"
    "class Moody(torch.nn.Module):\n"
    "    def forward(self, x):\n"
    "        return x + 1 if torch.compiler.is_compiling() or x.sum() < 0 else x + 2\n"
    "def make():\n"
    "    return Moody(), (torch.ones(2),)\n"
)


def test_verify_ends_well_when_everything_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is the last line."""
    assert main(["verify", TINY_BERT]) == OK
    assert capsys.readouterr().out.rstrip().endswith("outputs and all gradients are bitwise equal to eager")


def test_verify_fails_when_the_program_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model whose eager run does something else ends with 1 and names what differs."""
    written(MOODY, tmp_path, monkeypatch)
    assert main(["verify", "mine:make", "--forward"]) == FAILED
    page = capsys.readouterr().out
    assert "output output differs by at most 1" in page
    assert "mine.py:4" in page


MADE = (
    "import torch\n"
    "def make():\n"
    "    torch.manual_seed(0)\n"
    "    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), (torch.ones(2, 4),)\n"
    "def other():\n"
    "    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), (torch.ones(2, 4),)\n"
    "def wide():\n"
    "    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU()), (torch.ones(2, 5),)\n"
    "def deep():\n"
    "    return torch.nn.Sequential(torch.nn.Sequential(make()[0][0]), make()[0][1]), make()[1]\n"
    "def loss(y):\n"
    "    return y.sum()\n"
    "def scaled(by):\n"
    "    return lambda y: y.sum() * by\n"
    "half, whole = scaled(0.5), scaled(1.0)\n"
)


def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> str:
    """A file with the training step of a model that the working directory has."""
    written(MADE, tmp_path, monkeypatch)
    model, args = called("mine:make")()
    whence.capture(model, args, backward=called(loss)).save("p.whence")
    return "p.whence"


def test_verify_and_check_take_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of the capture, with the model that is named behind it; without one it is bad usage."""
    path = saved(tmp_path, monkeypatch, "whence.models:mean_square")
    monkeypatch.setattr("whence.cli.programs.capture", None)
    assert main(["verify", path, "mine:make"]) == OK
    assert capsys.readouterr().out.rstrip().endswith("all gradients are bitwise equal to eager")
    assert main(["verify", path, "mine:make", "--by", "call", "--json"]) == OK
    assert "call" in {row["kind"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert main(["verify", path, "mine:other"]) == FAILED and "differs" in capsys.readouterr().out
    assert main(["check", path, "mine:make"]) == OK and "hold on mine:make" in capsys.readouterr().out
    assert main(["check", path, "mine:other", "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["violations"]
    for command in ("verify", "check"):
        assert main([command, path]) == USAGE
        assert "p.whence holds a program, and no model" in capsys.readouterr().err


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("wide", "`0.weight` was Parameter float32[4, 4], requires grad"),
        ("deep", "`0` was Linear at capture"),
    ],
)
def test_tensors_of_other_shapes_are_a_check_that_failed(
    other: str,
    found: str,
    weights: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are violations as others are, and a comparison that failed: no bad usage."""
    written(MADE, tmp_path, monkeypatch)
    whence.capture(*called("mine:make")()).save("p.whence", weights=weights)
    assert main(["check", "p.whence", f"mine:{other}"]) == FAILED
    page = capsys.readouterr().out
    assert found in page and "guards do not hold on mine" in page
    assert main(["verify", "p.whence", f"mine:{other}"]) == FAILED


def test_a_file_keeps_of_a_loss_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever verifies its training step says where the loss is."""
    path = saved(tmp_path, monkeypatch, "mine:loss")
    assert main(["verify", path, "mine:make"]) == USAGE
    assert "--loss package.module:function" in capsys.readouterr().err
    assert main(["verify", path, "mine:make", "--loss", "mine:loss"]) == OK
    assert main(["check", path, "mine:make"]) == OK
    assert main(["verify", path, "mine:make", "--loss", "mine:lost"]) == USAGE


def test_check_looks_at_the_loss_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And at what that closes over; without, nobody knows which loss is meant."""
    path = saved(tmp_path, monkeypatch, "mine:half")
    assert main(["check", path, "mine:make"]) == FAILED
    assert main(["check", path, "mine:make", "--loss", "mine:half"]) == OK
    capsys.readouterr()
    assert main(["check", path, "mine:make", "--loss", "mine:whole"]) == FAILED
    assert "`closure by` was 0.5 at capture" in capsys.readouterr().out
    assert main(["check", "mine:make", "--loss", "mine:half"]) == OK
    assert main(["verify", path, "mine:make", "--loss", "mine:half"]) == OK


def test_verify_with_a_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is well where nothing differs by more; a distance is a number, 0 or more."""
    written(MOODY, tmp_path, monkeypatch)
    assert main(["verify", "mine:make", "--forward"]) == FAILED
    assert main(["verify", "mine:make", "--forward", "--atol", "0.5"]) == FAILED
    assert main(["verify", "mine:make", "--forward", "--atol", "1"]) == OK
    capsys.readouterr()
    assert main(["verify", "mine:make", "--forward", "--atol", "1", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["close"] is True and data["ok"] is False and data["atol"] == 1
    for wrong in ("-1", "nan", "near"):
        with pytest.raises(SystemExit) as bad_usage:
            main(["verify", "mine:make", "--atol", wrong])
        assert bad_usage.value.code == USAGE


def test_doctor_finds_all_as_expected(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, everything private that is relied on, and a training step that is eager's."""
    assert main(["doctor", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["versions"]["PyTorch"] == torch.__version__
    assert data["tried"] is data["step_ok"] is data["ok"] is True
    assert len(data["private"]) > 200
    assert all(data["private"].values())


def test_doctor_names_what_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not as expected is named, a training step that fails with its error, and the status is 1."""
    monkeypatch.setattr(
        "whence.execution.doctor.looked_for", lambda: {"torch._a.b": False, "torch._C.c": True}
    )
    monkeypatch.setattr("whence.execution.doctor.release", lambda: "2.16.0")
    monkeypatch.setattr("whence.cli.trusting.GPT", None)
    assert main(["doctor"]) == FAILED
    lines = capsys.readouterr().out.splitlines()
    told = {line[:15].strip(): line[15:] for line in lines}
    assert told["PyTorch"] == "2.16.0"
    assert told["tried"] == "no, only 2.13, 2.14, 2.15"
    assert told["private parts"] == "1 of 2 as expected"
    assert told["training step"].startswith("TypeError: ")
    assert lines[-1] == "gone: torch._a.b"
    with pytest.raises(SystemExit) as bad_usage:
        main(["doctor", "patient"])
    assert bad_usage.value.code == USAGE


def test_check_holds_on_another_instance(capsys: pytest.CaptureFixture[str]) -> None:
    """A capture of a model stands for the model built again; its guards are listed on demand."""
    assert main(["check", TINY_BERT, "--guards"]) == OK
    page = capsys.readouterr().out
    assert "BertSelfAttention · 2 of them" in page
    assert page.rstrip().endswith(f"guards hold on another instance of {TINY_BERT}")


def test_check_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    """Another model breaks guards, each in one line; the status says so."""
    other = TINY_BERT.replace("hidden_size=32", "hidden_act='relu', hidden_size=32")
    assert main(["check", TINY_BERT, other, "--forward"]) == FAILED
    lines = capsys.readouterr().out.splitlines()
    assert "`bert.encoder.layer.0.intermediate.intermediate_act_fn` was GELUActivation" in lines[0]
    assert lines[-1].startswith("3 of ")


def test_a_model_that_cannot_be_built_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A factory that fails is one sentence, with another status than a guard that does not hold."""
    written("def make():\n    raise ValueError('no weights')\n", tmp_path, monkeypatch)
    assert main(["check", TINY_BERT, "mine:make"]) == USAGE
    assert "mine:make cannot be built: ValueError: no weights" in capsys.readouterr().err


def test_check_as_json_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Violations and guards are plain data."""
    other = TINY_BERT.replace("vocab_size=60", "vocab_size=50")
    assert main(["check", TINY_BERT, other, "--json", "--guards"]) == FAILED
    data = json.loads(capsys.readouterr().out)
    assert len(data["guards"]) > 100
    assert data["violations"][0]["found"].startswith("Parameter float32[50, 32]")


def test_a_model_that_cannot_be_captured_fails_and_shows_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with 1; the error is followed by the last operations that were recorded."""
    written(
        "import torch\n"
        "class Deciding(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + 1 if x.sum() > 0 else x\n"
        "def make():\n"
        "    return Deciding(), (torch.ones(2),)\n",
        tmp_path,
        monkeypatch,
    )
    assert main(["show", "mine:make"]) == FAILED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("whence: [WH104] a branch")
    assert "  gt: bool[] = aten.gt.Scalar(sum_1, 0)" in lines
    assert "mine.py:4" in lines[-1]


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "no_such_package:make",
        "math:no_such_factory",
        "math:factorial",
        "hf:NoSuchModel",
        "hf:BertModel(",
        "hf:BertModel(2)",
        "hf:BertModel(hidden_size=7, num_attention_heads=2)",
        "hf:BertModel(no_such_option=1, num_hidden_layers=[])",
    ],
)
def test_bad_names_are_one_sentence_and_status_two(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of usage name the mistake, perhaps what to do, and where there is more."""
    assert main(["show", name]) == USAGE
    sentence, *rest, more = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("whence: [WH401] ")
    assert all(line.startswith("  what to do: ") for line in rest)
    assert more == "  more: docs/errors/WH401.md in whence's repository"


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["show"], ["show", TINY_BERT, "--depth", "-1"]]
)
def test_bad_arguments_end_with_status_two(arguments: list[str]) -> None:
    """The parser speaks for itself."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == USAGE


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_report_says_what_calls_cost(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In three forms, each with FLOPs and kept bytes."""
    assert main(["report", TINY_BERT, "--depth", "3", "--device", "h100", "--format", form]) == OK
    page = capsys.readouterr().out
    assert "bert.encoder" in page
    words = page.split("\n", 2)[:2]
    assert "kept bytes" in page or "kept_bytes" in page or ("kept" in words[0] and "bytes" in words[1])


def test_rows_of_a_report_are_filtered_and_kernels_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """By patterns as `select` takes them; one that fits nothing is bad usage."""
    assert main(["report", TINY_BERT, "--filter", "type=LayerNorm :: backward", "--measure", "--json"]) == OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows and {row["type"] for row in rows} == {"LayerNorm"}
    assert main(["report", TINY_BERT, "--filter", "type=Nothing"]) == USAGE
    assert "no call fits" in capsys.readouterr().err


def test_report_as_json_and_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain data; a device that nobody listed is bad usage."""
    assert main(["report", TINY_BERT, "--forward", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["rows"][0]["forward_flops"] > 0
    assert main(["report", TINY_BERT, "--device", "abacus"]) == USAGE
    assert "abacus" in capsys.readouterr().err


def test_diff_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing between a model and itself; another width is everywhere."""
    assert main(["diff", TINY_BERT, TINY_BERT, "--forward"]) == OK
    assert capsys.readouterr().out.strip() == "the same calls, operations and signature"
    wider = TINY_BERT.replace("intermediate_size=64", "intermediate_size=48")
    assert main(["diff", TINY_BERT, wider, "--forward", "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["rows"]


def test_a_file_stands_in_the_place_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show`, `report` and `diff` read what `program.save` wrote; a broken file ends with 1, none with 2."""
    path, broken = str(tmp_path / "model.whence"), tmp_path / "broken.whence"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    whence.capture(model, (torch.randn(2, 4),)).save(path, weights=False)
    assert main(["show", path]) == OK and "Linear" in capsys.readouterr().out
    assert main(["show", path, "--select", "0"]) == OK and "aten.linear" in capsys.readouterr().out
    assert main(["show", path, "--history"]) == OK and "as it was captured" in capsys.readouterr().out
    assert main(["report", path]) == OK and "Linear" in capsys.readouterr().out
    assert main(["diff", path, path]) == OK
    assert main(["graph", path]) == OK and "digraph" in capsys.readouterr().out
    assert main(["view", path, "--html", str(tmp_path / "page.html")]) == OK
    broken.write_bytes(b"PK")
    assert main(["show", str(broken)]) == FAILED and "WH504" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "none.whence")]) == USAGE and "WH401" in capsys.readouterr().err


SIZED = """
import torch

def make():
    return torch.nn.Sequential(Positive()), (torch.tensor([1.0, -1.0, 2.0]),)

class Positive(torch.nn.Module):
    def forward(self, x):
        return x[x > 0].sin().sum()
"""


@pytest.mark.parametrize(
    "command", [["report"], ["graph"], ["graph", "--format", "trace"], ["view", "--html", "page"]]
)
def test_sizes_that_data_decide_can_be_given(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nobody says one, the error does."""
    written(SIZED, tmp_path, monkeypatch)
    asked = [command[0], "mine:make", "--forward", *command[1:]]
    assert main(asked) == USAGE and "size_of_index" in capsys.readouterr().err
    assert main([*asked, "--size", "size_of_index=2"]) == OK
    assert main([*asked, "--size", "another=2"]) == USAGE
    with pytest.raises(SystemExit):
        main([*asked, "--size", "size_of_index"])


@pytest.mark.sweep
def test_what_a_file_needs_is_imported(tmp_path: Path) -> None:
    """In a process that has not loaded it yet; what cannot be imported is bad usage."""
    path = tmp_path / "bert.whence"
    _of_a_model(TINY_BERT, backward=False).save(path, weights=False)
    command = [sys.executable, "-m", "whence", "report", str(path), "--import"]
    done = subprocess.run(
        [*command, "transformers.modeling_outputs"], capture_output=True, text=True, check=False
    )
    assert done.returncode == OK and "BertModel" in done.stdout, done.stderr
    assert main(["report", str(path), "--import", "nowhere_at_all"]) == USAGE


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["dot", "model-explorer", "trace", "json"])
def test_graph_writes_what_other_tools_read(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed as it is, in a file, or as data that says how much it is."""
    assert main(["graph", TINY_BERT, "--forward", "--format", form]) == OK
    printed = capsys.readouterr().out
    assert printed.startswith("digraph" if form == "dot" else "{")
    file = tmp_path / "graph"
    assert main(["graph", TINY_BERT, "--forward", "--format", form, "-o", str(file), "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["bytes"] == file.stat().st_size and data["path"] == str(file)
    assert file.read_text().rstrip() == printed.rstrip()


def test_a_graph_that_cannot_be_written_is_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which file, and why."""
    assert main(["graph", TINY_BERT, "--forward", "-o", str(tmp_path / "nowhere" / "graph")]) == USAGE
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["show"], ["report", "--forward"], ["diff", TINY_BERT, "--forward"]])
def test_pages_beside_what_is_printed(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--html` a command that looks at programs writes their page, too."""
    page = tmp_path / "page.html"
    assert main([command[0], TINY_BERT, *command[1:], "--html", str(page)]) == OK
    assert page.read_text().startswith("<!doctype html>") and capsys.readouterr().out


def test_help_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """It names every command, how models are named, examples, and the exit status; a command is a line."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == OK
    first, *_ = (line for line in lines if line.startswith("    demo "))
    assert first == "    demo                capture the training step of a GPT, and verify it"
    for heading in ("commands:", "models:", "examples:", "exit status:", "completion:"):
        assert heading in lines


def test_what_takes_long_is_said_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal alone, and beside what is printed."""
    other = TINY_BERT.replace("vocab_size=60", "vocab_size=61")  # which no test has captured
    assert main(["show", other]) == OK
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["show", other]) == OK
    shown = capsys.readouterr()
    assert "capturing the forward of BertForMaskedLM" in shown.err and "capturing" not in shown.out
