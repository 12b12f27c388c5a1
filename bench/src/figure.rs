//! The result of a benchmark: one figure on both stacks and their ratio.

use serde::{Deserialize, Serialize};

use crate::machine::MachineState;
use crate::suites::{Better, Case};

/// One row of the report and of the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub name: String,
    pub unit: &'static str,
    pub portolan: Measured,
    /// `None` if the figure cannot be measured on the kernel's stack.
    pub kernel: Option<Measured>,
    /// Portolan's median divided by the kernel's, in the figure's own unit; for a figure with a bar,
    /// Portolan's median itself.
    pub ratio: Option<f64>,
    /// The limit that the ratio must keep to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bar: Option<f64>,
    /// The result of the paper that the experiment is from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paper: Option<&'static str>,
    pub machine: MachineState,
    #[serde(skip)]
    pub better: Better,
}

impl Figure {
    pub fn new(
        case: &Case,
        portolan: Measured,
        kernel: Option<Measured>,
        machine: MachineState,
    ) -> Figure {
        Figure {
            name: case.name.clone(),
            unit: case.unit,
            portolan,
            kernel,
            ratio: match case.bar {
                Some(_) => Some(portolan.values.median),
                None => kernel.map(|kernel| portolan.values.median / kernel.values.median),
            },
            bar: case.bar,
            paper: case.paper,
            machine,
            better: case.better,
        }
    }
}

/// The result of one run of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub value: f64,
    pub latency: Option<Latency>,
}

impl From<f64> for Sample {
    fn from(value: f64) -> Sample {
        Sample {
            value,
            latency: None,
        }
    }
}

/// Times of single round trips or requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    pub p50_us: f64,
    pub p99_us: f64,
}

/// The runs of a figure on one stack.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    #[serde(flatten)]
    pub values: Spread,
    /// The medians of the runs' percentiles, where the figure's program reports them.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
}

impl Measured {
    /// # Panics
    /// If there are no samples.
    pub fn of(samples: &[Sample]) -> Measured {
        let spread = |value: fn(&Sample) -> Option<f64>| {
            let mut values: Vec<f64> = samples.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| Spread::of(&mut values))
        };
        let p50 = spread(|sample| sample.latency.map(|latency| latency.p50_us));
        let p99 = spread(|sample| sample.latency.map(|latency| latency.p99_us));
        Measured {
            values: spread(|sample| Some(sample.value)).expect("a figure has samples"),
            latency: p50.zip(p99).map(|(p50, p99)| Latency {
                p50_us: p50.median,
                p99_us: p99.median,
            }),
        }
    }
}

/// Median and extremes of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
    use super::{Latency, Measured, Sample, Spread};

    #[test]
    fn percentiles_are_medians_of_the_runs() {
        let sample = |value, p99_us| Sample {
            value,
            latency: Some(Latency {
                p50_us: 1.0,
                p99_us,
            }),
        };
        let measured = Measured::of(&[sample(5.0, 30.0), sample(4.0, 10.0), sample(6.0, 20.0)]);
        assert_eq!(measured.values.median, 5.0);
        assert_eq!(measured.latency.unwrap().p99_us, 20.0);
        assert_eq!(Measured::of(&[Sample::from(1.0)]).latency, None);
    }

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
