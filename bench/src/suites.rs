//! The suites and what they share: a case measures one figure once, on one stack.

mod apps;
pub(crate) mod buffers;
mod bulk;
pub(crate) mod conns;
pub(crate) mod demux;
pub(crate) mod engine;
pub(crate) mod ext;
mod http;
mod local;
mod paths;
pub(crate) mod qos;
pub mod redis;
mod rtt;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

pub use portolan_bench_arguments::Suite;

use crate::bed::{Bed, Side, Stack};
use crate::figure::{Latency, Sample};
use crate::process::run;
use crate::tools::is_installed;
use crate::{Effort, MeasureError};

/// Returns the cases of a suite, in the order in which they are measured.
pub fn cases(suite: Suite, effort: Effort) -> Vec<Case> {
    match suite {
        Suite::Rtt => rtt::cases(effort),
        Suite::Bulk => bulk::cases(effort),
        Suite::Buffers => buffers::cases(effort),
        Suite::Redis => redis::cases(effort),
        Suite::Http => http::cases(effort),
        Suite::Conns => conns::cases(effort),
        Suite::Paths => paths::cases(effort),
        Suite::Local => local::cases(effort),
        Suite::Qos => qos::cases(effort),
        Suite::Demux => demux::cases(effort),
        Suite::Ext => ext::cases(effort),
        Suite::Engine => engine::cases(effort),
        Suite::Apps => apps::cases(effort),
    }
}

/// Whether lower or higher values of a figure are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
}

/// One figure and its measurement.
pub struct Case {
    pub name: String,
    pub unit: &'static str,
    pub better: Better,
    /// The limit that the figure must keep to. Figures without a bar are compared with the kernel's.
    pub bar: Option<f64>,
    /// The result of the paper that the experiment is from.
    pub paper: Option<&'static str>,
    stacks: &'static [Stack],
    /// Programs that not every machine has.
    programs: Vec<PathBuf>,
    measure: Box<Measure>,
}

type Measure = dyn Fn(&Bed, Stack) -> Result<Sample, MeasureError>;

impl Case {
    fn new<S: Into<Sample>>(
        name: impl Into<String>,
        unit: &'static str,
        better: Better,
        measure: impl Fn(&Bed, Stack) -> Result<S, MeasureError> + 'static,
    ) -> Case {
        Case {
            name: name.into(),
            unit,
            better,
            bar: None,
            paper: None,
            stacks: &[Stack::Kernel, Stack::Portolan],
            programs: Vec::new(),
            measure: Box::new(move |bed, stack| measure(bed, stack).map(Into::into)),
        }
    }

    /// Makes a case that can be measured on Portolan only.
    fn of_portolan(
        name: impl Into<String>,
        unit: &'static str,
        better: Better,
        measure: impl Fn(&Bed) -> Result<f64, MeasureError> + 'static,
    ) -> Case {
        Case {
            stacks: &[Stack::Portolan],
            ..Case::new(name, unit, better, move |bed, _| measure(bed))
        }
    }

    /// Has the case be left out where one of some programs is not installed.
    fn needs(mut self, programs: impl IntoIterator<Item: Into<PathBuf>>) -> Case {
        self.programs = programs.into_iter().map(Into::into).collect();
        self
    }

    /// Returns the first program that the case needs and that is not installed.
    pub fn missing_program(&self) -> Option<&Path> {
        let mut programs = self.programs.iter().map(PathBuf::as_path);
        programs.find(|program| !is_installed(program))
    }

    fn with_bar(mut self, bar: f64) -> Case {
        self.bar = Some(bar);
        self
    }

    fn of_paper(mut self, says: &'static str) -> Case {
        self.paper = Some(says);
        self
    }

    /// Returns true if the case can be measured on `stack`.
    pub fn is_of(&self, stack: Stack) -> bool {
        self.stacks.contains(&stack)
    }

    /// Measures once, with the programs of both sides on `stack`.
    pub fn run(&self, bed: &Bed, stack: Stack) -> Result<Sample, MeasureError> {
        (self.measure)(bed, stack)
    }
}

/// Placement of the two programs of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// On two hosts.
    Wire,
    /// Both on the server host.
    Host,
}

impl Reach {
    /// Returns the prefix of the names of figures.
    fn prefix(self) -> &'static str {
        match self {
            Reach::Wire => "",
            Reach::Host => "local-",
        }
    }

    /// Returns the endpoint that the server listens on.
    fn endpoint(self, bed: &Bed, port: u16) -> SocketAddr {
        match self {
            Reach::Wire => bed.endpoint(port),
            Reach::Host => (Ipv4Addr::LOCALHOST, port).into(),
        }
    }

    /// Returns a program on the client's side.
    fn client(self, bed: &Bed, stack: Stack, program: &str) -> Command {
        match self {
            Reach::Wire => bed.command(Side::Client, stack, program),
            Reach::Host => bed.neighbour(stack, program),
        }
    }

    /// Runs the traffic program on the client's side and returns one number of its report.
    fn traffic(
        self,
        bed: &Bed,
        stack: Stack,
        arguments: &[&str],
        field: &str,
    ) -> Result<f64, MeasureError> {
        number(
            "portolan-traffic",
            &self.report(bed, stack, arguments)?,
            &[field],
        )
    }

    /// Runs the traffic program on the client's side and returns the median and other percentiles of round trips.
    fn round_trips(
        self,
        bed: &Bed,
        stack: Stack,
        arguments: &[&str],
    ) -> Result<Sample, MeasureError> {
        let report = self.report(bed, stack, arguments)?;
        let percentile = |field| number("portolan-traffic", &report, &[field]);
        let latency = Latency {
            p50_us: percentile("p50_us")?,
            p99_us: percentile("p99_us")?,
        };
        Ok(Sample {
            value: latency.p50_us,
            latency: Some(latency),
        })
    }

    fn report(self, bed: &Bed, stack: Stack, arguments: &[&str]) -> Result<String, MeasureError> {
        let mut command = self.client(bed, stack, "portolan-traffic");
        Ok(run(command.args(arguments))?)
    }
}

/// Extracts one number from a program's JSON.
pub(crate) fn number(
    program: &'static str,
    output: &str,
    path: &[&str],
) -> Result<f64, MeasureError> {
    serde_json::from_str::<serde_json::Value>(output)
        .ok()
        .and_then(|report| {
            path.iter()
                .try_fold(&report, |value, key| value.get(key))?
                .as_f64()
        })
        .ok_or_else(|| MeasureError::Output {
            program,
            output: output.to_owned(),
        })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_figure_has_a_name_of_its_own() {
        let effort = Effort { quick: false };
        let names: Vec<_> = Suite::ALL
            .iter()
            .flat_map(|suite| cases(*suite, effort))
            .map(|case| case.name)
            .collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        for name in [
            "tcp-1-spin",
            "tcp-1-sleep",
            "udp-1472-spin",
            "local-tcp-1-sleep",
            "local-ttcp-1",
            "get-c50",
            "iperf3-1",
            "engine-send-1448",
        ] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
    }

    #[test]
    fn a_quick_run_measures_a_part_of_the_full_one() {
        let names = |quick| -> HashSet<String> {
            let effort = Effort { quick };
            Suite::ALL
                .iter()
                .flat_map(|suite| cases(*suite, effort))
                .map(|case| case.name)
                .collect()
        };
        assert!(names(true).is_subset(&names(false)));
        assert!(names(true).len() < names(false).len());
    }

    #[test]
    fn a_number_is_found_by_its_path() {
        let output = r#"{"end": {"sum": {"bits_per_second": 2.5e10}}}"#;
        let found = number("iperf3", output, &["end", "sum", "bits_per_second"]);
        assert_eq!(found.unwrap(), 2.5e10);
        assert!(number("iperf3", output, &["start"]).is_err());
        assert!(number("iperf3", "iperf3: error", &["end"]).is_err());
    }
}
