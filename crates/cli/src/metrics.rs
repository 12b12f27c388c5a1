//! `portolan metrics`: the server's reports as OpenMetrics. It needs no privilege and shares no memory with the
//! server: like any other command, a scrape sends a few requests on the control socket.

mod families;
mod text;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, anyhow, ensure};
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::QosReport;
use portolan_proto::report::{CounterReport, SessionReport, StatusReport};
use tiny_http::{Header, Method, Request, Response, Server};

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::server::unexpected;

const PATH: &str = "/metrics";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Serve the metrics by HTTP at a TCP address, such as 127.0.0.1:9469.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Serve the metrics by HTTP at a UNIX socket.
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    unix: Option<PathBuf>,
}

/// The server's reports, taken together.
struct Snapshot {
    status: StatusReport,
    counters: Vec<CounterReport>,
    sessions: Vec<SessionReport>,
    guarantees: QosReport,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let listener = match (arguments.listen, &arguments.unix) {
        (Some(address), _) => Server::http(address)
            .map_err(|error| anyhow!("{error}"))
            .with_context(|| address.to_string()),
        (None, Some(path)) => listen_at(path).with_context(|| path.display().to_string()),
        (None, None) => match service_managers() {
            Some(listener) => {
                Server::from_listener(listener, None).map_err(|error| anyhow!("{error}"))
            }
            None => {
                let snapshot = Snapshot::take(&arguments.server)?;
                return print(text::encode(&families::of(Some(&snapshot))).trim_end());
            }
        },
    }?;
    loop {
        let request = listener.recv()?;
        // The client may have closed the connection.
        let _ = answer(&arguments.server, request);
    }
}

/// The listener of a socket unit that started this program (`sd_listen_fds(3)`).
fn service_managers() -> Option<TcpListener> {
    let number = sd_notify::listen_fds().ok()?.next()?;
    // A number that names no descriptor was inherited from a program that had one.
    let listener = portolan_sys::descriptor::borrow(number).ok()?;
    let copied: OwnedFd = listener.try_clone_to_owned().ok()?;
    Some(copied.into())
}

/// Listens at `path`. Replaces a socket without a listener, which a dead process left; refuses any other file.
fn listen_at(path: &Path) -> anyhow::Result<Server> {
    if let Ok(metadata) = fs::symlink_metadata(path) {
        ensure!(metadata.file_type().is_socket(), "there is another file");
        let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        ensure!(
            UnixStream::connect(path).is_err_and(refused),
            "another process listens there"
        );
        fs::remove_file(path)?;
    }
    Server::http_unix(path).map_err(|error| anyhow!("{error}"))
}

fn answer(server: &ServerAddress, request: Request) -> io::Result<()> {
    if request.url() != PATH {
        return request.respond(Response::from_string(PATH).with_status_code(404));
    }
    if !matches!(request.method(), Method::Get | Method::Head) {
        return request.respond(Response::empty(405));
    }
    // Without a server `portolan_up` is 0.
    let snapshot = Snapshot::take(server).ok();
    let text = text::encode(&families::of(snapshot.as_ref()));
    let content_type =
        Header::from_bytes("Content-Type", text::CONTENT_TYPE).expect("a constant header is valid");
    request.respond(Response::from_string(text).with_header(content_type))
}

impl Snapshot {
    fn take(server: &ServerAddress) -> Result<Snapshot, Failure> {
        let ReplyBody::Status(status) = server.ask(RequestBody::ReadStatus)? else {
            return Err(unexpected());
        };
        Ok(Snapshot {
            status,
            counters: server.counters()?,
            sessions: server.sessions()?,
            guarantees: server.guarantees()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::{Shutdown, shutdown};

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("portolan-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn only_a_socket_without_a_listener_is_replaced() {
        let directory = directory("metrics");
        let file = directory.join("file");
        fs::write(&file, "kept").unwrap();
        assert!(listen_at(&file).is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept");

        let socket = directory.join("socket");
        let living = UnixListener::bind(&socket).unwrap();
        assert!(listen_at(&socket).is_err());
        // A child that another test forks has the descriptor, too, until it executes its program.
        shutdown(&living, Shutdown::Both).unwrap();
        drop(living);
        assert!(listen_at(&socket).is_ok());
        fs::remove_dir_all(&directory).unwrap();
    }
}
