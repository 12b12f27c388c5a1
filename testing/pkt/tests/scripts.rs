//! Every script passes on Linux, and on Portolan unless `deviations.txt` lists it with a reason; a
//! listed script that passes fails the test as well. Needs root and `cargo build --workspace`.

use std::path::PathBuf;

use portolan_pkt::bed::Stack;
use portolan_pkt::deviations::Deviations;
use portolan_pkt::pool::{Job, Played, jobs, play_all, scripts};
use portolan_pkt::prompt::go_first;

/// Number of simultaneous beds per stack. Scripts wait most of the time.
const BEDS: usize = 10;

const DEVIATIONS: &str = include_str!("../deviations.txt");

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scripts")
}

fn all_jobs() -> Vec<Job> {
    let scripts = scripts(&folder()).expect("the scripts are there");
    let jobs = scripts
        .iter()
        .map(|path| jobs(path).unwrap_or_else(|error| panic!("{error}")));
    jobs.flatten().collect()
}

#[test]
fn scripts_pass_on_linux_and_on_portolan_but_for_the_listed() {
    go_first();
    let deviations = Deviations::parse(DEVIATIONS).expect("a list of scripts and reasons");
    let jobs = all_jobs();
    let names: Vec<String> = jobs.iter().map(|job| job.name.clone()).collect();
    let (linux, portolan) = std::thread::scope(|scope| {
        let linux = scope.spawn(|| play_all(jobs.clone(), Stack::Linux, BEDS));
        let portolan = play_all(jobs.clone(), Stack::Portolan, BEDS);
        (linux.join().expect("it plays"), portolan)
    });
    let mut wrong: Vec<String> = linux
        .iter()
        .filter_map(|played| failed("linux", played))
        .collect();
    for played in &portolan {
        match (deviations.reason(&played.name), &played.result) {
            (Some(_), Ok(())) => wrong.push(format!("no longer deviates: {}", played.name)),
            (None, Err(_)) => wrong.extend(failed("portolan", played)),
            _ => {}
        }
    }
    for name in deviations.without_script(&names) {
        wrong.push(format!("deviates, but is no script: {name}"));
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        names.len(),
        wrong.join("\n")
    );
}

fn failed(stack: &str, played: &Played) -> Option<String> {
    let failure = played.result.as_ref().err()?;
    Some(format!("{stack}: {}\n{failure}", played.name))
}

#[test]
fn a_list_of_deviations_gives_a_reason_for_each() {
    assert!(Deviations::parse("open/active\n").is_err());
    assert!(Deviations::parse("open/active | \n").is_err());
    let list = Deviations::parse("# comment\n\nopen/active v6 | because\n").expect("it is one");
    assert_eq!(list.reason("open/active v6"), Some("because"));
    assert_eq!(list.reason("open/active"), None);
    assert_eq!(list.without_script(&[]), ["open/active v6"]);
}
