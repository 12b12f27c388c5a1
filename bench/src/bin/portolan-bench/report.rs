//! `portolan report`: measures what is missing in the report, and shows the progress and the remaining time.

use std::io::IsTerminal;
use std::time::Duration;

use portolan_bench::report::{Entry, Plan, ReportError, Step, render, run as measure, select};
use portolan_bench::{Effort, machine};
use portolan_bench_arguments::Report;

use crate::exit::{Failure, print};
use crate::figures::require_root;

/// How long the machine's load is observed before the first figure.
const WATCH: Duration = Duration::from_secs(1);

pub(crate) fn run(arguments: &Report) -> Result<(), Failure> {
    let effort = Effort {
        quick: arguments.quick,
    };
    let entries = select(&arguments.only).map_err(|error| Failure::Usage(error.into()))?;
    if arguments.list {
        return list(&entries, effort);
    }
    let page = arguments.output.join("index.html");
    if arguments.render {
        render(&arguments.output)?;
        return print(page.display());
    }
    require_root("report")?;
    if let Some(disturbance) = machine::disturbance(WATCH) {
        eprintln!("portolan: {disturbance}: these figures are not those of a quiet machine");
    }
    let plan = Plan {
        directory: arguments.output.clone(),
        entries,
        effort,
        again: arguments.again,
    };
    let complete = measure(&plan, tell).map_err(|error| match error {
        ReportError::OtherMachine { .. } => Failure::Usage(error.into()),
        error => error.into(),
    })?;
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
    print(page.display())?;
    if complete {
        Ok(())
    } else {
        Err(Failure::Shown)
    }
}

fn list(entries: &[&Entry], effort: Effort) -> Result<(), Failure> {
    for entry in entries {
        let seconds = entry.seconds(effort);
        print(format!(
            "{:<18} {:>4} s  {}: {}",
            entry.id,
            seconds,
            entry.name(),
            entry.title()
        ))?;
    }
    let all: u32 = entries.iter().map(|entry| entry.seconds(effort)).sum();
    print(format!("{} in all", time(Duration::from_secs(all.into()))))
}

/// Prints a line; on a terminal, it replaces the previous one.
fn tell(step: Step) {
    let is_terminal = std::io::stderr().is_terminal();
    if is_terminal {
        eprint!("\r\x1b[K");
    }
    match step {
        Step::Begins {
            entry,
            index,
            count,
            left,
        } => {
            let line = format!(
                "{index} of {count}: {}, {} ({} left)",
                entry.name(),
                entry.title(),
                time(left)
            );
            if is_terminal {
                eprint!("{line}")
            } else {
                eprintln!("{line}")
            }
        }
        Step::Failed { entry, error } => eprintln!("portolan: {}: {error}", entry.name()),
    }
}

fn time(left: Duration) -> String {
    match left.as_secs() {
        seconds @ ..90 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}
