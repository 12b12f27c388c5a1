//! Event loops and asynchronous runtimes on Portolan's own interface: tokio, hyper and mio over `portolan::net`, without
//! a preloaded library.

use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{bed, client, eventually, live_sessions};

const TOKIO: &str = env!("CARGO_BIN_EXE_portolan-tokio");
const MIO: &str = env!("CARGO_BIN_EXE_portolan-mio");
const PORT: u16 = 7410;
const SOON: Duration = Duration::from_secs(20);
/// The runtime waits for the sockets, or a thread of the library.
const WAYS: [&str; 2] = ["native", "threaded"];

fn program(bed: &Bed, side: Side, portolan: &str, words: &[&str]) -> Command {
    let mut command = bed.command(side, Stack::Kernel, TOKIO);
    command.args(words).env("PORTOLAN", portolan);
    command
}

fn said(mut command: Command) -> String {
    run(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

fn serve(bed: &Bed, way: &str, what: &str) -> Background {
    let endpoint = bed.endpoint(PORT).to_string();
    let mut command = program(bed, Side::Server, "require", &[way, what, &endpoint]);
    let server = bed.serve_command(PORT, TOKIO, &mut command);
    server.unwrap_or_else(|error| panic!("{error}"))
}

fn over_both_families(test: impl Fn(&Bed)) {
    let bed = bed();
    test(&bed);
    test(&bed.over_ipv6());
}

/// The same checks hold on tokio's own sockets, on Portolan's, and on Portolan's types without a server.
#[test]
fn sockets_behave_as_those_of_tokio() {
    over_both_families(|bed| {
        let address = bed.server.address.to_string();
        let runs = [
            ("kernel", "off"),
            ("native", "off"),
            ("threaded", "off"),
            ("native", "require"),
            ("threaded", "require"),
        ];
        for (stack, portolan) in runs {
            let cases = program(bed, Side::Server, portolan, &[stack, "cases", &address]);
            assert_eq!(said(cases), "as expected", "{stack} {portolan}");
        }
        assert!(eventually(SOON, || live_sessions(bed, Side::Server) == 0));
    });
}

#[test]
fn an_echo_server_on_several_threads_returns_what_was_sent() {
    over_both_families(|bed| {
        let endpoint = bed.endpoint(PORT).to_string();
        for way in WAYS {
            let server = serve(bed, way, "serve");
            for (stack, portolan) in [("kernel", "off"), ("native", "require")] {
                let words = [stack, "talk", &endpoint, "16", "100"];
                let talk = program(bed, Side::Client, portolan, &words);
                assert_eq!(said(talk), "exact", "{stack} to {way}");
            }
            drop(server);
        }
    });
}

#[test]
fn thousands_of_connections_wait_and_are_still_there() {
    const CONNECTIONS: &str = "3000";
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    for way in WAYS {
        let server = serve(&bed, way, "serve");
        let words = ["kernel", "idle", &endpoint, CONNECTIONS];
        assert_eq!(said(program(&bed, Side::Client, "off", &words)), "all");
        assert!(eventually(SOON, || live_sessions(&bed, Side::Server) <= 1));
        drop(server);
    }
}

#[test]
fn hyper_answers_curl_and_wrk() {
    over_both_families(|bed| {
        let url = format!("http://{}", bed.endpoint(PORT));
        for way in WAYS {
            let server = serve(bed, way, "web");
            for length in [0, 1, 1000, 3_000_000] {
                let url = format!("{url}/{length}");
                let page = client(bed, Stack::Kernel, "curl", &["-sS", "--fail", &url]);
                assert_eq!(page.len(), length, "{way}");
            }
            let words = ["-t", "1", "-c", "64", "-d", "1s", "--timeout", "20s", &url];
            let report = client(bed, Stack::Kernel, "wrk", &words);
            assert!(report.contains("Requests/sec:"), "{report}");
            assert!(!report.contains("Socket errors"), "{report}");
            drop(server);
        }
    });
}

#[test]
fn axum_answers_curl() {
    over_both_families(|bed| {
        let endpoint = bed.endpoint(PORT).to_string();
        let program = bed.tools().beside("axum-server").display().to_string();
        let mut command = bed.command(Side::Server, Stack::Kernel, &program);
        command.arg(&endpoint).env("PORTOLAN", "require");
        let server = bed.serve_command(PORT, &program, &mut command);
        let server = server.unwrap_or_else(|error| panic!("{error}"));
        let curl = |words: &[&str]| client(bed, Stack::Kernel, "curl", words);
        let url = format!("http://{endpoint}");
        let greeted = curl(&["-sS", "--fail", &format!("{url}/hello/World")]);
        assert_eq!(greeted, "Hello, World.");
        let sent = "0123456789".repeat(10_000);
        let echo = format!("{url}/echo");
        let returned = curl(&["-sS", "--fail", "--data-raw", &sent, &echo]);
        assert_eq!(returned, sent);
        assert!(live_sessions(bed, Side::Server) > 0);
        drop(server);
    });
}

#[test]
fn a_loop_on_mio_returns_what_was_sent() {
    over_both_families(|bed| {
        let endpoint = bed.endpoint(PORT).to_string();
        for portolan in ["require", "off"] {
            let mut command = bed.command(Side::Server, Stack::Kernel, MIO);
            command.arg(&endpoint).env("PORTOLAN", portolan);
            let server = bed.serve_command(PORT, MIO, &mut command);
            let server = server.unwrap_or_else(|error| panic!("{error}"));
            let words = ["kernel", "talk", &endpoint, "16", "100"];
            let talk = program(bed, Side::Client, "off", &words);
            assert_eq!(said(talk), "exact", "{portolan}");
            drop(server);
        }
    });
}
