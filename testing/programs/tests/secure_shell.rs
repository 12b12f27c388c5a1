//! OpenSSH, which passes each connection to another program, to a process in a sandbox that may not even
//! open a socket, and then to a process of another user.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PAIRINGS, PYTHON, Pairing, bed, client, counter, eventually};

const PORT: u16 = 7022;

/// Keys for the host and the user, and a configuration in the bed's directory.
struct Shell<'a> {
    bed: &'a Bed,
    _server: Background,
}

fn path(bed: &Bed, name: &str) -> String {
    bed.file(name).display().to_string()
}

fn make_key(bed: &Bed, name: &str) {
    if !bed.file(name).exists() {
        let file = path(bed, name);
        let mut command = Command::new("ssh-keygen");
        run(command.args(["-q", "-t", "ed25519", "-N", "", "-f", &file])).expect("a key");
    }
}

impl Shell<'_> {
    fn start(bed: &Bed, stack: Stack) -> Shell<'_> {
        for key in ["host_key", "user_key"] {
            make_key(bed, key);
        }
        // The chroot directory of sshd's sandbox.
        fs::create_dir_all("/run/sshd").expect("root");
        let authorized = bed.file("authorized_keys");
        fs::copy(bed.file("user_key.pub"), &authorized).expect("a key");
        fs::set_permissions(&authorized, fs::Permissions::from_mode(0o600)).expect("ours");
        let text = format!(
            "Port {PORT}\nListenAddress {}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n\
             Subsystem sftp internal-sftp\n",
            bed.server.address,
            path(bed, "host_key"),
            authorized.display(),
        );
        let config = path(bed, "sshd_config");
        fs::write(&config, text).expect("the bed's directory is writable");
        let server = bed
            .serve(stack, PORT, "/usr/sbin/sshd", &["-D", "-e", "-f", &config])
            .unwrap_or_else(|error| panic!("{error}"));
        Shell {
            bed,
            _server: server,
        }
    }

    fn options(&self) -> Vec<String> {
        let key = path(self.bed, "user_key");
        [
            "-F",
            "none",
            "-i",
            &key,
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "BatchMode=yes",
            "-o",
            "LogLevel=ERROR",
        ]
        .map(str::to_owned)
        .into()
    }

    fn words<'a>(&self, options: &'a [String], rest: &[&'a str]) -> Vec<&'a str> {
        options
            .iter()
            .map(String::as_str)
            .chain(rest.iter().copied())
            .collect()
    }

    fn remote(&self, stack: Stack, command: &str) -> String {
        let options = self.options();
        let target = format!("root@{}", self.bed.server.address);
        let port = PORT.to_string();
        let rest = ["-p", &port, &target, command];
        client(self.bed, stack, "ssh", &self.words(&options, &rest))
    }
}

fn digest(file: &str) -> String {
    let line = run(Command::new("sha256sum").arg(file)).expect("it is there");
    line.split_whitespace().next().expect("a digest").to_owned()
}

fn each(mut test: impl FnMut(&Bed, Pairing)) {
    let bed = bed();
    for pairing in PAIRINGS {
        eprintln!("{pairing:?}");
        test(&bed, pairing);
    }
}

#[test]
fn a_user_logs_in_by_key_and_runs_commands() {
    each(|bed, pairing| {
        let shell = Shell::start(bed, pairing.server);
        for _ in 0..3 {
            assert_eq!(
                shell
                    .remote(pairing.client, "echo $((6*7)) $SSH_CONNECTION")
                    .split(' ')
                    .next(),
                Some("42")
            );
        }
        let connection = shell.remote(pairing.client, "echo $SSH_CONNECTION");
        let expected = format!("{} {PORT}", bed.server.address);
        assert!(connection.ends_with(&expected), "{connection}");
        assert!(
            connection.starts_with(&bed.client.address.to_string()),
            "{connection}"
        );
    });
}

#[test]
fn a_large_file_is_copied_both_ways() {
    const BYTES: usize = 32 << 20;
    each(|bed, pairing| {
        let shell = Shell::start(bed, pairing.server);
        let mut bytes = vec![0; BYTES];
        let mut state = 1_u32;
        for chunk in bytes.chunks_mut(4) {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            chunk.copy_from_slice(&state.to_be_bytes()[..chunk.len()]);
        }
        let (here, there, back) = (path(bed, "here"), path(bed, "there"), path(bed, "back"));
        fs::write(&here, bytes).expect("there is room");
        let options = shell.options();
        let port = PORT.to_string();
        let remote = format!("root@{}:{there}", bed.server.address);
        for (from, to) in [(here.as_str(), remote.as_str()), (&remote, &back)] {
            let words = shell.words(&options, &["-P", &port, from, to]);
            client(bed, pairing.client, "scp", &words);
        }
        assert_eq!(digest(&there), digest(&here));
        assert_eq!(digest(&back), digest(&here));
    });
}

#[test]
fn a_port_is_forwarded() {
    each(|bed, pairing| {
        let shell = Shell::start(bed, pairing.server);
        let root = bed.file("www");
        fs::create_dir_all(&root).expect("the bed's directory is writable");
        fs::write(root.join("page"), "0123456789".repeat(100_000)).expect("there is room");
        let address = bed.server.address.to_string();
        let root = root.display().to_string();
        let _web = bed
            .serve(
                pairing.server,
                7080,
                PYTHON,
                &[
                    "-m",
                    "http.server",
                    "7080",
                    "--bind",
                    &address,
                    "--directory",
                    &root,
                ],
            )
            .unwrap_or_else(|error| panic!("{error}"));
        let options = shell.options();
        let port = PORT.to_string();
        let forward = format!("7081:{address}:7080");
        let target = format!("root@{address}");
        let mut command = bed.command(Side::Client, pairing.client, "ssh");
        command.args(shell.words(&options, &["-N", "-L", &forward, "-p", &port, &target]));
        let _tunnel = Background::start(&mut command).expect("it starts");
        let fetch = || {
            let mut curl = bed.command(Side::Client, Stack::Kernel, "curl");
            run(curl.args(["-sS", "--max-time", "10", "http://127.0.0.1:7081/page"]))
        };
        let mut page = String::new();
        assert!(eventually(Duration::from_secs(10), || {
            page = fetch().unwrap_or_default();
            !page.is_empty()
        }));
        assert_eq!(page.len(), 1_000_000);
    });
}

/// The sandboxed process cannot cache the session; the one that serves the user can.
#[test]
fn a_login_is_relayed_only_until_the_user_is_known() {
    let bed = bed();
    let shell = Shell::start(&bed, Stack::Portolan);
    let before = counter(&bed, Side::Server, "server", "relays_ended");
    assert_eq!(
        shell.remote(Stack::Portolan, "head -c 1000000 /dev/zero | wc -c"),
        "1000000"
    );
    let ended = counter(&bed, Side::Server, "server", "relays_ended") - before;
    assert_eq!(ended, 2, "after exec, and after the login");
}
