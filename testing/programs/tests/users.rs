//! Programs of a user without any privilege.

use std::path::Path;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::run;
use portolan_programs::{bed, public_programs};

const PORT: u16 = 7012;

fn as_nobody(bed: &Bed, programs: &Path, arguments: &[&str]) -> String {
    let mut command = bed.command(Side::Client, Stack::Kernel, "setpriv");
    command.args([
        "--reuid=nobody",
        "--regid=nogroup",
        "--clear-groups",
        "--no-new-privs",
        "--",
    ]);
    command
        .arg(programs.join("portolan"))
        .args(["run", "--require", "--"]);
    command
        .arg(programs.join("portolan-traffic"))
        .args(arguments);
    run(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn nobody_can_run_programs_on_portolan() {
    let bed = bed();
    let programs = public_programs(&bed);
    let endpoint = bed.endpoint(PORT).to_string();
    let _greet = bed
        .serve(
            Stack::Portolan,
            PORT,
            "portolan-traffic",
            &["greet", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let report = as_nobody(
        &bed,
        &programs,
        &["connect", &endpoint, "--count", "20", "--seconds", "10"],
    );
    assert!(report.contains("\"connections\":20"), "{report}");
}
