"""Ticks that can be read whatever an axis spans, and labels that lie on nothing."""

from collections.abc import Sequence

import pytest
from jitney.sweep.drawing import Note, picture, short, show_number, show_seconds, ticks
from matplotlib.axes import Axes
from matplotlib.text import Annotation


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0205, 0.0481), (1, 2000), (3e-5, 40), (0.011, 0.0112), (99, 101), (1e-9, 1e9), (5, 5.001)],
)
@pytest.mark.parametrize("most", [6, 8])
def test_an_axis_has_a_few_ticks_within_it(low: float, high: float, most: int) -> None:
    made = ticks(low, high, most)
    assert (1 if high < 1.1 * low else 2) <= len(made) <= most
    assert made == sorted(set(made))
    assert all(low <= tick <= high for tick in made)


def test_ticks_have_their_units() -> None:
    assert [show_seconds(value) for value in (0, 5e-5, 0.02, 3)] == ["0", "50 µs", "20 ms", "3 s"]
    assert [show_number(value) for value in (0.5, 200, 20_000)] == ["0.5", "200", "20k"]


def test_a_long_title_keeps_both_ends() -> None:
    made = short("a model of a long name, before the change of the kernels")
    assert len(made) <= 31
    assert made.startswith("a model")
    assert made.endswith("the kernels")
    assert short("digits") == "digits"


def test_labels_lie_on_no_line_and_not_on_each_other() -> None:
    """Twenty points of which many are too close to be labelled: of the boxes that are written, no
    two cross, and no line goes through one."""
    seen: list[Axes] = []

    def paint(axes: Sequence[Axes]) -> list[Note]:
        seen.extend(axes)
        xs = [1.0 + 0.1 * i for i in range(10)] + [10.0 * i for i in range(1, 11)]
        ys = [x * x for x in xs]
        axes[0].plot(xs, ys)
        return [Note(axes[0], f"{i}00", x, y) for i, (x, y) in enumerate(zip(xs, ys, strict=True))]

    picture("labels", 1, paint, "caption", "alt")
    seen[0].figure.draw_without_rendering()  # or the boxes are those of another resolution
    texts = [child for child in seen[0].get_children() if isinstance(child, Annotation)]
    boxes = [text.get_window_extent() for text in texts]
    assert 8 <= len(boxes) < 20
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
        (line,) = seen[0].get_lines()
        path = line.get_transform().transform_path(line.get_path())
        assert not path.intersects_bbox(box, filled=False), texts[i].get_text()
