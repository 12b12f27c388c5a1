//! `portolan bench`: measures, prints each figure when it is complete, and writes JSON.

use std::fmt::Display;
use std::fs;
use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use portolan_bench::bed::Bed;
use portolan_bench::figure::Figure;
use portolan_bench::suites::{Case, Suite};
use portolan_bench::{Effort, Progress, machine, select, table};
use portolan_bench_arguments::Bench;

use crate::exit::{Failure, print};

/// How long the machine's load is observed before the first figure.
const WATCH: Duration = Duration::from_secs(1);

pub(crate) fn run(arguments: &Bench) -> Result<(), Failure> {
    let cases = chosen(arguments)?;
    require_root("bench")?;
    let sink = match &arguments.json {
        Some(path) if path.as_os_str() == "-" => Sink::Errors,
        _ => Sink::Output,
    };
    let bed = Bed::new().context("cannot make the bed")?;
    let (figures, complete) = measure(&bed, &cases, arguments.runs.into(), sink)?;
    let json = || serde_json::to_string_pretty(&figures);
    match (&arguments.json, sink) {
        (None, _) => {}
        (Some(_), Sink::Errors) => print(json()?)?,
        (Some(path), Sink::Output) => {
            fs::write(path, json()?).with_context(|| path.display().to_string())?;
        }
    }
    if complete {
        Ok(())
    } else {
        Err(Failure::Shown)
    }
}

fn chosen(arguments: &Bench) -> Result<Vec<Case>, Failure> {
    let suites = if arguments.suites.is_empty() {
        &Suite::ALL[..]
    } else {
        &arguments.suites
    };
    let effort = Effort {
        quick: arguments.quick,
    };
    let cases = select(suites, &arguments.only, effort);
    if cases.is_empty() {
        let error = anyhow!("no figure of these suites contains {:?}", arguments.only);
        return Err(Failure::Usage(error));
    }
    Ok(cases)
}

/// The stream that the table is written to.
#[derive(Clone, Copy)]
pub(crate) enum Sink {
    Output,
    Errors,
}

impl Sink {
    fn line(self, line: impl Display) -> Result<(), Failure> {
        match self {
            Sink::Output => print(line),
            Sink::Errors => {
                eprintln!("{line}");
                Ok(())
            }
        }
    }
}

/// Measures all cases and prints each figure when it is complete. Returns false if a case failed.
pub(crate) fn measure(
    bed: &Bed,
    cases: &[Case],
    runs: usize,
    sink: Sink,
) -> Result<(Vec<Figure>, bool), Failure> {
    if let Some(disturbance) = machine::disturbance(WATCH) {
        eprintln!("portolan: {disturbance}: these figures are not those of a quiet machine");
    }
    sink.line(table::head())?;
    let is_terminal = std::io::stderr().is_terminal();
    let mut complete = true;
    let mut outcome = Ok(());
    let figures = portolan_bench::measure(bed, cases, runs, |progress| {
        if is_terminal {
            eprint!("\r\x1b[K");
        }
        match progress {
            Progress::Begins { name, index, count } if is_terminal => {
                eprint!("{index} of {count}: {name}");
            }
            Progress::Begins { .. } => {}
            Progress::Done(figure) => {
                if outcome.is_ok() {
                    outcome = sink.line(table::row(figure));
                }
            }
            Progress::LeftOut { name, program } => {
                let program = program.display();
                eprintln!("portolan: {name} is left out: {program} is not installed");
            }
            Progress::Failed { name, error } => {
                complete = false;
                eprintln!("portolan: {name}: {error}");
            }
        }
    });
    outcome?;
    sink.line(table::legend())?;
    Ok((figures, complete))
}

/// Fails unless the caller is root, which making network namespaces requires.
pub(crate) fn require_root(command: &str) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "{command} makes network namespaces: run it as root"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Bench,
    }

    #[test]
    fn a_text_that_no_figure_contains_is_wrong_usage() {
        let cases =
            |words: &[&str]| chosen(&Line::parse_from([&["bench"], words].concat()).arguments);
        assert!(cases(&["rtt", "--only", "tcp-1-spin"]).is_ok_and(|cases| cases.len() == 1));
        assert!(matches!(
            cases(&["rtt", "--only", "iperf3"]),
            Err(Failure::Usage(_))
        ));
    }
}
