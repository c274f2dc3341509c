import pytest

from whence import CallSite, ModulePath, Origin, Phase, Quality, Source


def site(path: str, index: int = 0) -> CallSite:
    return CallSite(ModulePath.parse(path), index, "Linear")


@pytest.mark.parametrize(("index", "text"), [(0, "layer"), (1, "layer@1"), (12, "layer@12")])
def test_call_site_shows_later_calls(index: int, text: str) -> None:
    """The first call of a module prints as its path, later ones with their number."""
    assert str(site("layer", index)) == text


def test_calls_of_one_module_are_two_sites() -> None:
    """One module called twice is two call sites."""
    assert site("layer") != site("layer", 1)


def test_source_names_file_line_and_function() -> None:
    """A source prints as a person would look it up."""
    assert str(Source("model.py", 3, "Model.forward")) == "model.py:3 in Model.forward"


def test_origin_prints_everything_it_knows() -> None:
    """Phase, module, quality, the forward node and the line, in this order."""
    origin = Origin(
        Phase.BACKWARD, (site("mlp"),), source=Source("m.py", 3, "f"), forward="mm", recomputed=True
    )
    assert str(origin) == "backward · mlp · exact · recomputed · of mm · m.py:3 in f"


def test_accumulated_origin_names_all_contributors() -> None:
    """A sum of several users' gradients shows each of them."""
    origin = Origin(Phase.BACKWARD, (site("a"), site("b", 1)), Quality.ACCUMULATED)
    assert str(origin) == "backward · a + b@1 · accumulated"


def test_origin_outside_any_module_says_so() -> None:
    """A loss or a free function belongs to no module."""
    assert str(Origin(Phase.FORWARD)) == "forward · outside any module · exact"


def test_root_call_is_spelled_out() -> None:
    """The root's empty path is printed as a word."""
    assert str(Origin(Phase.FORWARD, (site(""),))) == "forward · (root) · exact"
