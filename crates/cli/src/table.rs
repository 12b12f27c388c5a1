//! Tables in the style of ss(8): columns as wide as their widest cell.

/// Returns the head and the rows, aligned.
pub(crate) fn lines(head: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let head: Vec<String> = head.iter().map(|&name| name.to_owned()).collect();
    let width = |column: usize| {
        let cells = rows.iter().chain([&head]).filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    [&head]
        .into_iter()
        .chain(rows)
        .map(|row| align(row, &widths))
        .collect()
}

fn align(row: &[String], widths: &[usize]) -> String {
    let cells: Vec<_> = row
        .iter()
        .zip(widths)
        .map(|(cell, width)| format!("{cell:<width$}"))
        .collect();
    cells.join(" ").trim_end().to_owned()
}

/// Replaces control characters in a name that somebody else chose, which could move the reader's cursor.
pub(crate) fn printable(name: &str) -> String {
    name.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        assert_eq!(
            lines(&["A", "Head"], &[row(["long", "x"]), row(["ä", ""])]),
            ["A    Head", "long x", "ä"]
        );
    }
}
