//! The five papers, their tables and figures, and the numbers printed there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::model::{Cell, Quoted, Source, Table};

/// The paper of an exhibit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Paper {
    Mb,
    Ms,
    Px,
    Br,
    Ne,
    /// No paper: measurements that the papers do not have.
    Today,
}

impl Paper {
    pub(super) const ALL: [Paper; 6] = [
        Paper::Mb,
        Paper::Ms,
        Paper::Px,
        Paper::Br,
        Paper::Ne,
        Paper::Today,
    ];

    pub(super) fn short(self) -> &'static str {
        match self {
            Paper::Mb => "MB",
            Paper::Ms => "MS",
            Paper::Px => "PX",
            Paper::Br => "BR",
            Paper::Ne => "NE",
            Paper::Today => "today",
        }
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Paper::Mb => "Protocol Service Decomposition for High-Performance Networking",
            Paper::Ms => "Migrating Sockets",
            Paper::Px => {
                "An Extensible Protocol Architecture for Application-Specific Networking (Plexus)"
            }
            Paper::Br => "Demultiplexing on the ATM Adapter",
            Paper::Ne => "Protocol Implementation in a Vertically Structured Operating System",
            Paper::Today => "What the papers did not have",
        }
    }

    pub(super) fn authors(self) -> &'static str {
        match self {
            Paper::Mb => "C. Maeda, B. N. Bershad, SOSP 1993",
            Paper::Ms => "D. K. Y. Yau, S. S. Lam, IEEE/ACM Transactions on Networking, 1998",
            Paper::Px => "M. E. Fiuczynski, B. N. Bershad, USENIX 1996",
            Paper::Br => "E. W. Biersack, E. Rütsche, Journal on High Speed Networks, 1996",
            Paper::Ne => "R. Black, P. Barham, A. Donnelly, N. Stratford, LCN 1997",
            Paper::Today => "",
        }
    }
}

/// Numbers as a paper prints them.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Original {
    /// The paper's hardware and software, and where the paper says so.
    setting: String,
    facts: Vec<String>,
    #[serde(default)]
    tables: Vec<Printed>,
}

#[derive(Clone, Debug, Deserialize)]
struct Printed {
    title: String,
    head: Vec<String>,
    /// The first cell of each row is its label.
    rows: Vec<Vec<toml::Value>>,
}

/// Returns the papers' numbers by the identifier of the exhibit.
///
/// # Panics
/// Never: a test reads all of them.
pub(super) fn originals() -> BTreeMap<String, Original> {
    toml::from_str(include_str!("papers.toml")).expect("the papers' numbers are well-formed")
}

impl Original {
    pub(super) fn quoted(&self) -> Quoted {
        Quoted {
            setting: self.setting.clone(),
            facts: self.facts.clone(),
            tables: self.tables().collect(),
        }
    }

    fn tables(&self) -> impl Iterator<Item = Table> {
        self.tables.iter().map(|printed| {
            let table = Table::new(&printed.title, &printed.head);
            printed.rows.iter().fold(table, |table, row| {
                let (label, cells) = row.split_first().expect("a row has a label");
                let label = label.as_str().unwrap_or_default();
                table.row(label, Source::Paper, cells.iter().map(cell))
            })
        })
    }

    /// Returns the first table's number in a row and column.
    pub(super) fn number(&self, row: &str, column: usize) -> f64 {
        let rows = self.tables.iter().flat_map(|table| &table.rows);
        let mut found = rows.filter(|cells| cells[0].as_str() == Some(row));
        let cells = found.next().expect("the paper has the row");
        number(&cells[column + 1]).expect("the paper has a number there")
    }
}

fn number(value: &toml::Value) -> Option<f64> {
    value
        .as_float()
        .or_else(|| value.as_integer().map(|whole| whole as f64))
}

fn cell(value: &toml::Value) -> Cell {
    match (number(value), value.as_str()) {
        (Some(number), _) => Cell::Number(number),
        (_, Some(text)) => Cell::Text(text.to_owned()),
        _ => Cell::Empty,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_papers_are_as_wide_as_their_heads() {
        for (id, original) in originals() {
            for table in original.tables() {
                for row in &table.rows {
                    assert_eq!(row.cells.len(), table.head.len(), "{id}: {}", row.label);
                }
            }
            assert!(!original.setting.is_empty());
            assert!(
                !original.facts.is_empty() || !original.tables.is_empty(),
                "{id}"
            );
        }
    }

    #[test]
    fn sums_of_the_papers_tables_are_theirs() {
        let originals = originals();
        // MB's numbers are exact to 2 µs: they were rounded before they were added.
        let table = &originals["mb-table4"];
        for column in 0..12 {
            let sum = ["send path", "receive path", "network"]
                .map(|row| table.number(row, column))
                .iter()
                .sum::<f64>();
            let difference = (table.number("total", column) - sum).abs();
            assert!(difference <= 2.0, "column {column}: {difference}");
        }
    }
}
