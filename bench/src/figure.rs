//! What a benchmark yields: one figure on both stacks and their ratio.

use serde::Serialize;

use crate::suites::{Better, Case};

/// One row of the report and of the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub name: String,
    pub unit: &'static str,
    pub portolan: Spread,
    /// `None` for what the kernel's stack cannot be measured by.
    pub kernel: Option<Spread>,
    /// Portolan's median over the kernel's, in the figure's own unit; of a figure with a bar Portolan's
    /// median itself.
    pub ratio: Option<f64>,
    /// What is asked of the ratio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bar: Option<f64>,
    /// What the paper that made the experiment says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paper: Option<&'static str>,
    #[serde(skip)]
    pub better: Better,
}

impl Figure {
    pub fn new(case: &Case, portolan: Spread, kernel: Option<Spread>) -> Figure {
        Figure {
            name: case.name.clone(),
            unit: case.unit,
            portolan,
            kernel,
            ratio: match case.bar {
                Some(_) => Some(portolan.median),
                None => kernel.map(|kernel| portolan.median / kernel.median),
            },
            bar: case.bar,
            paper: case.paper,
            better: case.better,
        }
    }
}

/// Median and extremes of some runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Sorts the measurements of one figure.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(values: &mut [f64]) -> Spread {
        values.sort_unstable_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            (values[middle - 1] + values[middle]) / 2.0
        };
        Spread {
            median,
            min: values[0],
            max: values[values.len() - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn an_odd_number_of_runs_has_a_measured_median() {
        let spread = Spread::of(&mut [3.0, 1.0, 2.0]);
        assert_eq!(
            spread,
            Spread {
                median: 2.0,
                min: 1.0,
                max: 3.0
            }
        );
    }

    #[test]
    fn an_even_number_of_runs_takes_the_mean_of_the_middle_two() {
        let spread = Spread::of(&mut [4.0, 1.0, 2.0, 3.0]);
        assert_eq!(
            spread,
            Spread {
                median: 2.5,
                min: 1.0,
                max: 4.0
            }
        );
    }
}
