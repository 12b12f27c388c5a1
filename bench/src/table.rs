//! Figures as an aligned table.

use std::fmt::Write;

use crate::figure::{Figure, Spread};
use crate::suites::Better;

const NAME_WIDTH: usize = 30;
const SPREAD_WIDTH: usize = 28;

/// Returns the column heads.
pub fn head() -> String {
    format!(
        "{:<NAME_WIDTH$} {:<8} {:>SPREAD_WIDTH$} {:>SPREAD_WIDTH$} {:>7}  better",
        "figure", "unit", "portolan (min - max)", "kernel (min - max)", "ratio"
    )
}

/// Returns one row; the last column states which direction is better and which stack is.
pub fn row(figure: &Figure) -> String {
    let direction = match figure.better {
        Better::Lower => "lower",
        Better::Higher => "higher",
    };
    let absent = || "-".to_owned();
    let mut row = format!(
        "{:<NAME_WIDTH$} {:<8} {:>SPREAD_WIDTH$} {:>SPREAD_WIDTH$} {:>7}  {direction}",
        figure.name,
        figure.unit,
        spread(figure.portolan.values),
        figure
            .kernel
            .map_or_else(absent, |kernel| spread(kernel.values)),
        figure.ratio.map_or_else(absent, |ratio| match figure.bar {
            Some(_) => format!("{ratio:.4}"),
            None => format!("{ratio:.2}"),
        }),
    );
    let wins = figure
        .ratio
        .is_some_and(|ratio| match (figure.better, figure.bar) {
            (Better::Lower, None) => ratio < 1.0,
            (Better::Higher, None) => ratio > 1.0,
            (Better::Lower, Some(bar)) => ratio <= bar,
            (Better::Higher, Some(bar)) => ratio >= bar,
        });
    if wins {
        row.push_str(" *");
    }
    if let Some(paper) = figure.paper {
        // Writing into a string cannot fail.
        let _ = write!(row, "  (paper: {paper})");
    }
    row
}

/// Explains the marks of [`row`].
pub fn legend() -> &'static str {
    "ratio: portolan / kernel of the medians, or the figure itself where it has a bar; *: Portolan is better, or within the bar"
}

fn spread(spread: Spread) -> String {
    let mut text = amount(spread.median);
    // Writing into a string cannot fail.
    let _ = write!(text, " ({} - {})", amount(spread.min), amount(spread.max));
    text
}

fn amount(value: f64) -> String {
    if value >= 1000.0 {
        format!("{value:.0}")
    } else if value < 0.1 {
        format!("{value:.4}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Measured;
    use crate::machine::MachineState;

    fn figure(better: Better, ratio: f64) -> Figure {
        let measured = Measured {
            values: Spread {
                median: 4.5,
                min: 4.0,
                max: 12_345.6,
            },
            latency: None,
        };
        Figure {
            name: "tcp-1-spin".into(),
            unit: "us",
            portolan: measured,
            kernel: Some(measured),
            ratio: Some(ratio),
            bar: None,
            paper: None,
            machine: MachineState::default(),
            better,
        }
    }

    #[test]
    fn rows_align_with_the_head() {
        let row = row(&figure(Better::Lower, 0.5));
        assert_eq!(row.find("lower"), head().find("better"));
    }

    #[test]
    fn the_better_stack_is_marked_in_the_direction_of_the_figure() {
        assert!(row(&figure(Better::Lower, 0.5)).ends_with("lower *"));
        assert!(row(&figure(Better::Lower, 1.5)).ends_with("lower"));
        assert!(row(&figure(Better::Higher, 1.5)).ends_with("higher *"));
        assert!(row(&figure(Better::Higher, 0.5)).ends_with("higher"));
    }

    #[test]
    fn a_figure_with_a_bar_is_marked_when_it_keeps_to_it() {
        let with_bar = |ratio| Figure {
            bar: Some(0.03),
            ..figure(Better::Lower, ratio)
        };
        assert!(row(&with_bar(0.03)).ends_with("lower *"));
        assert!(row(&with_bar(0.04)).ends_with("lower"));
    }
}
