# SPDX-License-Identifier: Apache-2.0
"""The table, the picture and the page of learners, by hand."""

from learner_page import Learner, PolicyPoint, draw_learners, learner_table, write_page


def point(level: float, kl: float) -> PolicyPoint:
    return PolicyPoint([level - 0.1, level + 0.1], [1.0, 3.0], [kl, kl], [10.0, 12.0])


LEARNERS = [
    Learner("SFT", [point(0.2, 0.0)]),
    Learner("DPO", [point(0.3, 1.0), point(0.4, 2.0)], seconds=12.4),
    Learner("best of 16", [point(0.5, 1.83)], bound=True),
]


def test_rows_of_learners_show_where_each_ends() -> None:
    lines = learner_table(LEARNERS).splitlines()
    assert lines[0].split()[0] == "learner" and len(lines) == 5
    assert lines[2].startswith("SFT") and lines[2].endswith("–")
    # Two prompts: .3 and .5, half a range of .1 is the standard error, Student's t with one degree is 12.706.
    assert "0.400 [-0.871, 1.671]" in lines[3] and lines[3].endswith("12")
    assert "≤ 1.8" in lines[4]
    row = next(line for line in learner_table(LEARNERS, as_page=True).splitlines() if line.startswith("| DPO"))
    assert [cell.strip() for cell in row.split("|")][2:4] == ["0.400 [-0.871, 1.671]", "2.00 [-10.71, 14.71]"]


def test_page_and_picture_of_learners(tmp_path) -> None:
    draw_learners(LEARNERS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = write_page(tmp_path, "Title", {"First": "text\n\n", "Second": "more"})
    assert page.read_text(encoding="utf-8") == "# Title\n\n## First\n\ntext\n\n## Second\n\nmore\n"
