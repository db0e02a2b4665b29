"""Cells of the benchmark of smooth maps, for a tiny sample."""

from benchmarks import warp


def test_a_line_has_times_and_their_ratios():
    lines = list(warp.rows([(12, 10, 2)], times=1))
    assert [line[2] for line in lines] == [*warp.CHANGES]
    for line in lines:
        assert len(line) == len(warp.COLUMNS) == len(warp.WIDTHS) and line[0] == "12x10x2"
        read, augmented, ratio = map(float, line[3:6])
        assert augmented > 0 and (read == 0 or abs(ratio - augmented / read) <= 0.6 * ratio)
