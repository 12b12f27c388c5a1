//! `portolan-pkt`: plays single scripts, for use by hand.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use portolan_pkt::bed::Stack;
use portolan_pkt::pool::{Job, Played, jobs, play_all, scripts};
use portolan_pkt::prompt::go_first;

const USAGE: &str = "\
usage: portolan-pkt [--linux] [--portolan] [--beds N] [--times N] SCRIPT-OR-FOLDER…
Plays scripts against the kernel's stack (the default), Portolan, or both. Root only.";

struct Options {
    stacks: Vec<Stack>,
    beds: usize,
    times: usize,
    paths: Vec<PathBuf>,
}

fn main() -> ExitCode {
    let Some(options) = options(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let jobs = match all_jobs(&options.paths) {
        Ok(jobs) => jobs,
        Err(error) => {
            eprintln!("portolan-pkt: {error}");
            return ExitCode::from(2);
        }
    };
    go_first();
    let mut well = true;
    for _ in 0..options.times {
        for stack in &options.stacks {
            for played in play_all(jobs.clone(), *stack, options.beds) {
                well &= played.result.is_ok();
                print(*stack, &played);
            }
        }
    }
    if well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn options(mut arguments: impl Iterator<Item = String>) -> Option<Options> {
    let mut options = Options {
        stacks: Vec::new(),
        beds: 8,
        times: 1,
        paths: Vec::new(),
    };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--linux" => options.stacks.push(Stack::Linux),
            "--portolan" => options.stacks.push(Stack::Portolan),
            "--beds" => options.beds = arguments.next()?.parse().ok()?,
            "--times" => options.times = arguments.next()?.parse().ok()?,
            flag if flag.starts_with('-') => return None,
            path => options.paths.push(path.into()),
        }
    }
    if options.stacks.is_empty() {
        options.stacks.push(Stack::Linux);
    }
    (!options.paths.is_empty()).then_some(options)
}

fn all_jobs(paths: &[PathBuf]) -> Result<Vec<Job>, Box<dyn std::error::Error>> {
    let mut found = Vec::new();
    for path in paths {
        for script in files(path)? {
            found.extend(jobs(&script)?);
        }
    }
    Ok(found)
}

fn files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if path.is_dir() {
        scripts(path)
    } else {
        Ok(vec![path.to_owned()])
    }
}

fn print(stack: Stack, played: &Played) {
    let name = &played.name;
    let seconds = played.took.as_secs_f64();
    match &played.result {
        Ok(()) => println!("ok    {stack:8} {seconds:6.2} s  {name}"),
        Err(failure) => {
            println!("FAIL  {stack:8} {seconds:6.2} s  {name}");
            println!("{failure}");
        }
    }
}
