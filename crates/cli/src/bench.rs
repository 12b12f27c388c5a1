//! `portolan bench`: measures, prints a table as the figures come, writes JSON.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use portolan_bench::bed::Bed;
use portolan_bench::figure::Figure;
use portolan_bench::suites::Suite;
use portolan_bench::{Effort, table};

use crate::exit::{Failure, print};

#[derive(clap::Args)]
pub struct Arguments {
    /// What to measure [default: all].
    #[arg(value_enum)]
    suites: Vec<Suite>,
    /// Measure only figures whose names contain this.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Also write the figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measurements of each figure on each stack.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// Run fewer and shorter cases.
    #[arg(long)]
    quick: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    require_root("bench")?;
    let suites = if arguments.suites.is_empty() {
        &Suite::ALL[..]
    } else {
        &arguments.suites
    };
    let bed = Bed::new().context("cannot make the bed")?;
    let effort = Effort {
        runs: arguments.runs.into(),
        quick: arguments.quick,
    };
    let (figures, complete) = measure(&bed, suites, &arguments.only, effort)?;
    if let Some(path) = &arguments.json {
        fs::write(path, serde_json::to_string_pretty(&figures)?)
            .with_context(|| path.display().to_string())?;
    }
    if complete {
        Ok(())
    } else {
        Err(Failure::Shown)
    }
}

/// Measures and prints each figure as it comes; false if a case failed.
pub fn measure(
    bed: &Bed,
    suites: &[Suite],
    only: &str,
    effort: Effort,
) -> Result<(Vec<Figure>, bool), Failure> {
    print(table::head())?;
    let mut complete = true;
    let figures = portolan_bench::measure(
        bed,
        suites,
        only,
        effort,
        |figure| println!("{}", table::row(figure)),
        |name, error| {
            complete = false;
            eprintln!("portolan: {name}: {error}");
        },
    );
    print(table::legend())?;
    Ok((figures, complete))
}

/// Beds are made of namespaces, which only root makes.
pub fn require_root(command: &str) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "{command} makes network namespaces: run it as root"
    );
    Ok(())
}
