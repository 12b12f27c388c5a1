//! Programs that inherit their sockets: from inetd, by systemd's protocol (`LISTEN_FDS`), and nginx
//! from nginx.

use std::fs;
use std::io::Read;
use std::thread;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{PYTHON, bed, client, counter, eventually};
use rustix::process::{Pid, Signal, kill_process};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/activated.py");
const TIMEOUT: Duration = Duration::from_secs(10);

fn serve(bed: &Bed, port: u16, program: &str, arguments: &[&str]) -> Background {
    bed.serve(Stack::Portolan, port, program, arguments)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn assert_echoes(bed: &Bed, port: u16, connections: usize) {
    let accepted = || counter(bed, Side::Server, "server", "passive_opens");
    let before = accepted();
    for _ in 0..connections {
        let mut stream = connect(bed, port);
        exchange(&mut stream, 8, 5000);
        assert_ends_in_order(stream);
    }
    assert_eq!(accepted() - before, connections as u64);
}

/// inetd starts one program per connection, on its standard streams, or one for all, with the listener there.
#[test]
fn inetd_starts_programs_for_connections_and_for_listeners() {
    let bed = bed();
    let address = bed.server.address;
    let lines = [
        format!("{address}:7050 stream tcp nowait root /bin/cat cat"),
        format!("{address}:7051 stream tcp nowait root /bin/busybox busybox cat"),
        format!("{address}:7052 stream tcp wait root {PYTHON} python3 {FIXTURE} 0"),
        format!("{address}:7053 stream tcp nowait root {PYTHON} python3 {FIXTURE} peer"),
    ];
    let config = bed.file("inetd.conf");
    fs::write(&config, lines.join("\n") + "\n").expect("the bed's directory is writable");
    let config = config.display().to_string();
    let _inetd = serve(&bed, 7050, "/usr/sbin/inetd", &["-i", &config]);
    for port in [7050, 7051, 7052] {
        assert_echoes(&bed, port, 4);
    }
    let mut stream = connect(&bed, 7053);
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("it ends in order");
    assert_eq!(said, bed.client.address.to_string());
}

#[test]
fn systemd_activates_a_program_with_its_listener() {
    let bed = bed();
    let listen = bed.endpoint(7054).to_string();
    let words = ["-l", &listen, PYTHON, FIXTURE, "listen_fds"];
    let _activator = serve(&bed, 7054, "systemd-socket-activate", &words);
    assert_echoes(&bed, 7054, 4);
}

#[test]
fn systemd_activates_a_program_for_each_connection() {
    let bed = bed();
    let listen = bed.endpoint(7055).to_string();
    let words = ["-l", &listen, "--accept", "--inetd", "/bin/cat"];
    let _activator = serve(&bed, 7055, "systemd-socket-activate", &words);
    assert_echoes(&bed, 7055, 4);
}

/// A web server that runs as a daemon.
struct Nginx<'a> {
    bed: &'a Bed,
    config: String,
}

impl Nginx<'_> {
    fn start(bed: &Bed) -> Nginx<'_> {
        let root = bed.file("www");
        fs::create_dir_all(&root).expect("the bed's directory is writable");
        fs::write(root.join("page"), "0123456789".repeat(1000)).expect("there is room");
        let text = format!(
            "user root; worker_processes 2; pid {}; error_log {} notice;\nevents {{}}\n\
             http {{ access_log off; server {{ listen {}; root {}; }} }}\n",
            bed.file("nginx.pid").display(),
            bed.file("nginx.log").display(),
            bed.endpoint(7056),
            root.display(),
        );
        let config = bed.file("nginx.conf");
        fs::write(&config, text).expect("the bed's directory is writable");
        let config = config.display().to_string();
        let mut command = bed.command(Side::Server, Stack::Portolan, "/usr/sbin/nginx");
        run(command.args(["-c", &config])).expect("it starts");
        let nginx = Nginx { bed, config };
        nginx.await_file("nginx.pid");
        nginx
    }

    fn pid(&self, file: &str) -> Option<Pid> {
        let text = fs::read_to_string(self.bed.file(file)).ok()?;
        Pid::from_raw(text.trim().parse().ok()?)
    }

    fn await_file(&self, file: &str) -> Pid {
        assert!(
            eventually(TIMEOUT, || self.pid(file).is_some()),
            "no {file}"
        );
        self.pid(file).expect("it was there")
    }

    fn signal(&self, pid: Pid, signal: Signal) {
        kill_process(pid, signal).expect("it runs");
    }

    fn log(&self) -> String {
        fs::read_to_string(self.bed.file("nginx.log")).unwrap_or_default()
    }

    fn assert_serves(&self) {
        let url = format!("http://{}/page", self.bed.endpoint(7056));
        let page = client(
            self.bed,
            Stack::Kernel,
            "curl",
            &["-sS", "--max-time", "10", &url],
        );
        assert_eq!(page.len(), 10_000, "{}", self.config);
    }
}

/// Runs `what` while clients send requests without a pause.
fn under_load(nginx: &Nginx<'_>, what: impl FnOnce()) -> String {
    let url = format!("http://{}/page", nginx.bed.endpoint(7056));
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            let words = [
                "-t",
                "1",
                "-c",
                "8",
                "-d",
                "5s",
                "-H",
                "Connection: close",
                &url,
            ];
            client(nginx.bed, Stack::Kernel, "wrk", &words)
        });
        // Give the load time to start.
        thread::sleep(Duration::from_millis(500));
        what();
        load.join().expect("it ends")
    })
}

fn report_is_clean(report: &str) -> bool {
    report.contains("Requests/sec:")
        && !report.contains("Socket errors")
        && !report.contains("Non-2xx")
}

fn assert_no_failure(nginx: &Nginx<'_>, report: &str) {
    if !report_is_clean(report) {
        let counters = nginx.bed.portolan(Side::Server, &["counters"]);
        let counters = counters.unwrap_or_else(|error| error.to_string());
        panic!("{report}\n{}\n{counters}", nginx.log());
    }
}

#[test]
fn nginx_reloads_under_load_without_a_failed_request() {
    let bed = bed();
    let nginx = Nginx::start(&bed);
    let report = under_load(&nginx, || {
        for _ in 0..3 {
            nginx.signal(nginx.await_file("nginx.pid"), Signal::HUP);
            thread::sleep(Duration::from_secs(1));
        }
    });
    assert_no_failure(&nginx, &report);
    assert!(nginx.log().matches("reconfiguring").count() >= 3);
    nginx.assert_serves();
}

#[test]
fn nginx_gives_its_listener_to_a_new_program_under_load_without_a_failed_request() {
    let bed = bed();
    let nginx = Nginx::start(&bed);
    let old = nginx.await_file("nginx.pid");
    let report = under_load(&nginx, || {
        nginx.signal(old, Signal::USR2);
        nginx.await_file("nginx.pid.oldbin");
        let new = nginx.await_file("nginx.pid");
        assert_ne!(new, old);
        thread::sleep(Duration::from_millis(500));
        nginx.signal(old, Signal::WINCH);
        thread::sleep(Duration::from_secs(1));
        nginx.signal(old, Signal::QUIT);
        assert!(eventually(TIMEOUT, || !bed
            .file("nginx.pid.oldbin")
            .exists()));
    });
    let said = nginx.log();
    assert_no_failure(&nginx, &report);
    assert!(
        !said.contains("[emerg]") && !said.contains("[alert]"),
        "{said}"
    );
    // The server has opened the connection, or a worker has performed its handshake.
    let cached = || counter(&bed, Side::Server, "server", "sessions_cached");
    let performed = || counter(&bed, Side::Server, "stack", "delegated_handshakes");
    let served = || cached() + performed();
    // Wait until the requests left over from the load are served.
    let mut before = served();
    assert!(eventually(TIMEOUT, || {
        thread::sleep(Duration::from_millis(300));
        std::mem::replace(&mut before, served()) == before
    }));
    nginx.assert_serves();
    let has_served = || served() - before == 1;
    assert!(
        eventually(TIMEOUT, has_served),
        "by the new program's own channel"
    );
}
