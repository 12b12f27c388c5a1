//! The report's data as written to JSON: exhibits, each of which is a table or figure of a paper, with panels.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::figure::Spread;
use crate::machine::MachineState;

/// All results so far; further runs add to them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub machine: Machine,
    /// By identifier.
    pub exhibits: BTreeMap<String, Exhibit>,
}

/// The machine of the measurements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    pub processor: String,
    pub cores: usize,
    pub memory_mib: u64,
    pub kernel: String,
    pub is_virtual: bool,
    pub portolan: String,
}

/// A table or figure, measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Exhibit {
    pub paper: String,
    /// Such as `Table 2`.
    pub number: String,
    pub title: String,
    /// The command that repeats the measurement.
    pub command: String,
    /// The paper's own numbers; None for an exhibit that no paper has.
    pub original: Option<Quoted>,
    pub panels: Vec<Panel>,
    pub claims: Vec<Claim>,
    /// What the reader must know about the measurement.
    pub notes: Vec<String>,
    pub is_quick: bool,
    pub seconds: f64,
    pub state: MachineState,
    /// Time of completion, in seconds since 1970.
    pub at: u64,
}

/// Numbers as a paper prints them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Quoted {
    /// The paper's hardware and software, and where the paper says so.
    pub setting: String,
    pub facts: Vec<String>,
    pub tables: Vec<Table>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Panel {
    Table(Table),
    Plot(Plot),
}

/// Where numbers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Source {
    Paper,
    Kernel,
    /// Portolan with its protocols in the server.
    Server,
    Portolan,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Table {
    pub title: String,
    /// Heads of the columns after the first.
    pub head: Vec<String>,
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub label: String,
    pub source: Source,
    pub cells: Vec<Cell>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Cell {
    Spread(Spread),
    Number(f64),
    Text(String),
    /// `null`: no value.
    Empty,
}

impl From<Spread> for Cell {
    /// Converts NaN, which stands for a value that cannot be measured, to text.
    fn from(spread: Spread) -> Cell {
        if spread.median.is_nan() {
            Cell::Text("no relay".to_owned())
        } else {
            Cell::Spread(spread)
        }
    }
}

impl From<f64> for Cell {
    fn from(number: f64) -> Cell {
        Cell::Number(number)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Cell {
        value.map_or(Cell::Empty, Into::into)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plot {
    pub title: String,
    pub x: AxisLabel,
    pub y: AxisLabel,
    pub style: Style,
    pub curves: Vec<Curve>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Style {
    /// Measured points, connected by lines.
    Points,
    /// A line without points, for many values.
    Line,
    /// One bar for each curve, which has one point.
    Bars,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AxisLabel {
    pub label: String,
    pub scale: Scale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Scale {
    /// Starts at zero.
    Linear,
    Logarithmic,
}

impl AxisLabel {
    pub(super) fn linear(label: &str) -> AxisLabel {
        AxisLabel {
            label: label.to_owned(),
            scale: Scale::Linear,
        }
    }

    pub(super) fn logarithmic(label: &str) -> AxisLabel {
        AxisLabel {
            label: label.to_owned(),
            scale: Scale::Logarithmic,
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Curve {
    pub label: String,
    pub source: Source,
    pub points: Vec<Point>,
}

impl Curve {
    /// Makes a curve of single values.
    pub(super) fn of(
        label: impl Into<String>,
        source: Source,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Curve {
        let point = |(x, y)| Point { x, y, range: None };
        Curve {
            label: label.into(),
            source,
            points: points.into_iter().map(point).collect(),
        }
    }

    /// Makes a curve of several runs' spreads.
    pub(super) fn of_spreads(
        label: impl Into<String>,
        source: Source,
        points: impl IntoIterator<Item = (f64, Spread)>,
    ) -> Curve {
        let point = |(x, spread): (f64, Spread)| Point {
            x,
            y: spread.median,
            range: Some([spread.min, spread.max]),
        };
        Curve {
            label: label.into(),
            source,
            points: points
                .into_iter()
                .map(point)
                .filter(|point| point.y.is_finite())
                .collect(),
        }
    }

    /// Returns the value of the first point at or after `x`.
    pub(super) fn at(&self, x: f64) -> f64 {
        let found = self.points.iter().find(|point| point.x >= x);
        found
            .or(self.points.last())
            .map_or(f64::NAN, |point| point.y)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Point {
    pub x: f64,
    pub y: f64,
    /// Minimum and maximum of all runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
}

/// A property of the shape of the paper's table or figure, and whether this measurement has it, too.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Claim {
    /// The paper's finding.
    pub shape: String,
    /// The numbers that decide.
    pub here: String,
    pub holds: bool,
    /// The reason if it does not hold.
    pub why: String,
}

/// The result of a measurement.
#[derive(Default)]
pub(super) struct Content {
    pub panels: Vec<Panel>,
    pub claims: Vec<Claim>,
    pub notes: Vec<String>,
}

impl Content {
    #[must_use]
    pub(super) fn with(mut self, panel: impl Into<Panel>) -> Content {
        self.panels.push(panel.into());
        self
    }

    /// Adds a claim. `why` explains a shape that differs from the paper's.
    #[must_use]
    pub(super) fn claim(mut self, shape: &str, holds: bool, here: String, why: &str) -> Content {
        self.claims.push(Claim {
            shape: shape.to_owned(),
            here,
            holds,
            why: why.to_owned(),
        });
        self
    }

    #[must_use]
    pub(super) fn note(mut self, note: &str) -> Content {
        self.notes.push(note.to_owned());
        self
    }
}

impl From<Table> for Panel {
    fn from(table: Table) -> Panel {
        Panel::Table(table)
    }
}

impl From<Plot> for Panel {
    fn from(plot: Plot) -> Panel {
        Panel::Plot(plot)
    }
}

impl Table {
    pub(super) fn new<H: ToString>(title: &str, head: impl IntoIterator<Item = H>) -> Table {
        Table {
            title: title.to_owned(),
            head: head.into_iter().map(|word| word.to_string()).collect(),
            rows: Vec::new(),
        }
    }

    #[must_use]
    pub(super) fn row<C: Into<Cell>>(
        mut self,
        label: impl Into<String>,
        source: Source,
        cells: impl IntoIterator<Item = C>,
    ) -> Table {
        self.rows.push(Row {
            label: label.into(),
            source,
            cells: cells.into_iter().map(Into::into).collect(),
        });
        self
    }
}
