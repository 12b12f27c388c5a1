//! Servers that are demanding for a socket library: they isolate their children in namespaces, run them as other users
//! or with another environment, or have threads that wait for each other's sockets.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;

use portolan_bench::bed::{Bed, Stack};
use portolan_bench::services::dovecot;
use portolan_programs::strangers::{Client, address, each_start};
use portolan_programs::{PYTHON, file, serve};

fn curl(client: Client<'_>, arguments: &[&str]) -> String {
    let arguments = [&["-sS", "--max-time", "15"], arguments].concat();
    client.run("curl", &arguments)
}

fn open_to_all(path: &std::path::Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours");
}

/// Its sessions are in separate namespaces without a network, and change their user by libc.
#[test]
fn vsftpd_lets_in_and_gives_files() {
    const PORT: u16 = 7121;
    // The directory that the package's service creates.
    fs::create_dir_all("/run/vsftpd/empty").expect("root");
    let start = |bed: &Bed, stack: Stack| {
        let root = bed.file("ftp");
        fs::create_dir_all(&root).expect("the bed's directory is writable");
        let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i ^ (i >> 9)) as u8).collect();
        fs::write(root.join("large"), bytes).expect("it is ours");
        fs::write(root.join("small"), "well").expect("it is ours");
        open_to_all(bed.file("").as_path());
        open_to_all(&root);
        let listen = match bed.server.address {
            IpAddr::V4(address) => format!("listen=YES\nlisten_address={address}"),
            IpAddr::V6(address) => format!("listen=NO\nlisten_ipv6=YES\nlisten_address6={address}"),
        };
        let text = format!(
            "{listen}\nbackground=NO\nlisten_port={PORT}\nanon_root={}\n",
            root.display(),
        );
        let config = file(bed, "vsftpd.conf", text);
        serve(bed, stack, PORT, "vsftpd", &[&config])
    };
    each_start(start, |client| {
        let bed = client.bed;
        let base = format!("ftp://{}", bed.endpoint(PORT));
        assert_eq!(curl(client, &[&format!("{base}/small")]), "well");
        let copy = bed.file("copy").display().to_string();
        curl(client, &["-o", &copy, &format!("{base}/large")]);
        let (sent, got) = (fs::read(bed.file("ftp").join("large")), fs::read(&copy));
        assert!(sent.expect("it is there") == got.expect("it came"));
    });
}

/// A login process passes its connection to one that was started with another environment.
#[test]
fn dovecot_lets_in_and_gives_mail() {
    const PORT: u16 = 7143;
    let start = |bed: &Bed, stack: Stack| {
        let server = dovecot::serve(bed, stack, PORT, &"words ".repeat(20_000));
        server.unwrap_or_else(|error| panic!("{error}"))
    };
    each_start(start, |client| {
        let bed = client.bed;
        let base = format!("imap://{}", bed.endpoint(PORT));
        let user = ["--user", "someone:secret"];
        let letter = curl(
            client,
            &[&user[..], &[&format!("{base}/INBOX;MAILINDEX=1")]].concat(),
        );
        assert!(letter.contains("Subject: well"));
        assert_eq!(letter.matches("words").count(), 20_000);
    });
}

/// One thread accepts and hands its connections to four others, which sleep on separate epoll sets.
#[test]
fn memcached_with_threads_returns_what_was_stored() {
    const PORT: u16 = 7165;
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/memcached.py");
    let port = PORT.to_string();
    let start = |bed: &Bed, stack: Stack| {
        let options = ["-u", "root", "-t", "4", "-U", "0"];
        let (listens, port) = (bed.endpoint(PORT).to_string(), PORT.to_string());
        let options = [&options[..], &["-l", &listens, "-p", &port]].concat();
        serve(bed, stack, PORT, "memcached", &options)
    };
    each_start(start, |client| {
        for _ in 0..2 {
            let arguments = [SCRIPT, &address(client.bed), &port];
            assert_eq!(client.run(PYTHON, &arguments), "exact");
        }
    });
}

/// Each of its threads accepts and connects; the sockets move between threads.
#[test]
fn haproxy_with_threads_passes_pages_and_streams_on() {
    const PORT: u16 = 7181;
    const PAGES: u16 = 7183;
    let start = |bed: &Bed, stack: Stack| {
        let at = |port: u16| bed.endpoint(port);
        let text = format!(
            "global\n nbthread 4\n\
             defaults\n timeout connect 5s\n timeout client 15s\n timeout server 15s\n\
             listen stream\n mode tcp\n bind {stream}\n server one {origin}\n\
             listen pages\n mode http\n bind {pages}\n server one {origin}\n",
            stream = at(7182),
            pages = at(PORT),
            origin = at(PAGES),
        );
        let config = file(bed, "haproxy.cfg", text);
        serve(bed, stack, PORT, "haproxy", &["-db", "-f", &config])
    };
    let with_pages = |bed: &Bed, stack: Stack| {
        let root = bed.file("pages");
        fs::create_dir_all(&root).expect("the bed's directory is writable");
        fs::write(root.join("page"), "words ".repeat(20_000)).expect("it is ours");
        let (root, address, port) = (root.display().to_string(), address(bed), PAGES.to_string());
        let arguments = [
            "-m",
            "http.server",
            &port,
            "--bind",
            &address,
            "--directory",
            &root,
        ];
        serve(bed, stack, PAGES, PYTHON, &arguments)
    };
    let start = |bed: &Bed, stack: Stack| (with_pages(bed, stack), start(bed, stack));
    each_start(start, |client| {
        for port in [PORT, 7182] {
            let url = format!("http://{}/page?[1-8]", client.bed.endpoint(port));
            let pages = curl(client, &["-Z", &url]);
            assert_eq!(pages.matches('w').count(), 8 * 20_000, "{port}");
        }
    });
}

/// A thread of ZeroMQ has its sockets, and the program's threads wake it.
#[test]
fn zeromq_returns_what_was_sent() {
    const PORT: u16 = 7185;
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/messages.py");
    let endpoint = |bed: &Bed| format!("tcp://{}", bed.endpoint(PORT));
    let start = |bed: &Bed, stack: Stack| {
        let arguments = [SCRIPT, "serve", &endpoint(bed)];
        serve(bed, stack, PORT, PYTHON, &arguments)
    };
    each_start(start, |client| {
        let arguments = [SCRIPT, "talk", &endpoint(client.bed), "4", "200"];
        assert_eq!(client.run(PYTHON, &arguments), "exact");
    });
}

/// Threads of a pool share one poller, and complete each other's calls.
#[test]
fn nng_answers_each_request() {
    const PORT: u16 = 7187;
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/requests.py");
    let endpoint = |bed: &Bed| format!("tcp://{}", bed.endpoint(PORT));
    let start = |bed: &Bed, stack: Stack| {
        let arguments = [SCRIPT, "serve", &endpoint(bed)];
        serve(bed, stack, PORT, PYTHON, &arguments)
    };
    each_start(start, |client| {
        let arguments = [SCRIPT, "talk", &endpoint(client.bed), "500"];
        assert_eq!(client.run(PYTHON, &arguments), "exact");
    });
}

/// Tasks move between threads, and the runtime has no timer that would hide a missed wake-up.
#[test]
fn tokio_without_timers_returns_what_was_sent() {
    const PORT: u16 = 7189;
    const PROGRAM: &str = env!("CARGO_BIN_EXE_portolan-tokio");
    let start = |bed: &Bed, stack: Stack| {
        let endpoint = bed.endpoint(PORT).to_string();
        serve(bed, stack, PORT, PROGRAM, &["kernel", "serve", &endpoint])
    };
    each_start(start, |client| {
        let endpoint = client.bed.endpoint(PORT).to_string();
        let arguments = ["kernel", "talk", &endpoint, "16", "100"];
        assert_eq!(client.run(PROGRAM, &arguments), "exact");
    });
}
