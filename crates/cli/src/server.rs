//! Client of the server: one request, and its reply, the parts of a list, or replies that do not end, over the SEQPACKET
//! control socket.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use portolan_proto::control::{ListPart, Reply, ReplyBody, Request, RequestBody};
use portolan_proto::qos::{QosReply, QosReport, QosRequest};
use portolan_proto::report::{CounterReport, RawReport, SessionReport};
use portolan_proto::{MAX_MESSAGE, decode, encode};
use portolan_sys::namespace::lock_path;
use portolan_sys::unix::{Connection, ReceiveError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::de::DeserializeOwned;

use crate::ServerAddress;
use crate::exit::Failure;

/// Bounds the wait for a reply, so that a server that hangs does not hang the command.
const TIMEOUT: Duration = Duration::from_secs(5);

/// How long the restart of a server may take.
const RESTART: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(10);

const REQUEST_ID: u32 = 1;

impl ServerAddress {
    pub(crate) fn path(&self) -> anyhow::Result<PathBuf> {
        match &self.socket {
            Some(path) => Ok(path.clone()),
            None => Ok(portolan_sys::namespace::control_path()?),
        }
    }

    /// Fails if no server listens on the socket.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let path = self.path()?;
        Connection::connect(&path).with_context(|| path.display().to_string())?;
        Ok(())
    }

    /// As [`ServerAddress::check`]; waits for the next server, as sockets do, after one that has left its lock.
    pub(crate) fn check_in_time(&self) -> anyhow::Result<()> {
        let lock = lock_path(&self.path()?);
        let begun = Instant::now();
        loop {
            let outcome = self.check();
            if outcome.is_ok() || !lock.exists() || begun.elapsed() > RESTART {
                return outcome;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Sends one request and returns the body of its reply.
    pub(crate) fn ask(&self, body: RequestBody) -> Result<ReplyBody, Failure> {
        Ok(self.ask_with_fds(body)?.0)
    }

    /// Returns all sessions that the server knows.
    pub(crate) fn sessions(&self) -> Result<Vec<SessionReport>, Failure> {
        self.ask_for(RequestBody::ListSessions, |reply| match reply {
            ReplyBody::Sessions(list) => Some(list),
            _ => None,
        })
    }

    /// Returns all protocols that programs implement themselves.
    pub(crate) fn raw_flows(&self) -> Result<Vec<RawReport>, Failure> {
        self.ask_for(RequestBody::ListRawFlows, |reply| match reply {
            ReplyBody::RawFlows(list) => Some(list),
            _ => None,
        })
    }

    /// Returns all counters: the sums first, then those of each holder.
    pub(crate) fn counters(&self) -> Result<Vec<CounterReport>, Failure> {
        self.ask_for(RequestBody::ReadCounters, |reply| match reply {
            ReplyBody::Counters(list) => Some(list),
            _ => None,
        })
    }

    /// Sends a request for a list, of which each reply brings the part that `part` takes from it.
    pub(crate) fn ask_for<T: DeserializeOwned>(
        &self,
        body: RequestBody,
        part: impl Fn(ReplyBody) -> Option<ListPart>,
    ) -> Result<T, Failure> {
        let path = self.path()?;
        let failed =
            |error: anyhow::Error| Failure::NoServer(error.context(path.display().to_string()));
        let connection = send(&path, body, &[]).map_err(failed)?;
        let mut bytes = Vec::new();
        loop {
            let (reply, _) = receive(&connection).map_err(failed)?;
            let part = part(reply).ok_or_else(unexpected)?;
            bytes.extend(part.bytes);
            if part.is_last {
                return decode(&bytes).map_err(|_| unexpected());
            }
        }
    }

    /// Returns all guarantees.
    pub(crate) fn guarantees(&self) -> Result<QosReport, Failure> {
        self.ask_for(RequestBody::Qos(QosRequest::Show), |reply| match reply {
            ReplyBody::Qos(QosReply::State(report)) => Some(report),
            _ => None,
        })
    }

    /// Sends a request that is answered more than once.
    pub(crate) fn subscribe(&self, body: RequestBody) -> Result<Subscription, Failure> {
        let path = self.path()?;
        let connection = send(&path, body, &[])
            .with_context(|| path.display().to_string())
            .map_err(Failure::NoServer)?;
        Ok(Subscription {
            connection,
            buffer: vec![0; MAX_MESSAGE],
        })
    }

    /// As [`ServerAddress::ask`], for a request with descriptors.
    pub(crate) fn ask_showing(
        &self,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<ReplyBody, Failure> {
        Ok(self.exchange(body, fds)?.0)
    }

    fn ask_with_fds(&self, body: RequestBody) -> Result<(ReplyBody, Vec<OwnedFd>), Failure> {
        self.exchange(body, &[])
    }

    fn exchange(
        &self,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Failure> {
        let path = self.path()?;
        exchange(&path, body, fds)
            .with_context(|| path.display().to_string())
            .map_err(Failure::NoServer)
    }
}

/// Replies that come for as long as the connection lasts.
pub(crate) struct Subscription {
    connection: Connection,
    buffer: Vec<u8>,
}

impl Subscription {
    /// Returns the next reply, if there is one.
    pub(crate) fn receive(&mut self) -> anyhow::Result<Option<(ReplyBody, Vec<OwnedFd>)>> {
        let received = match self.connection.receive(&mut self.buffer) {
            Err(ReceiveError::Blocked) => return Ok(None),
            received => received?,
        };
        let reply: Reply = decode(&self.buffer[..received.length])?;
        Ok(Some((reply.body, received.fds.into_iter().collect())))
    }

    /// Waits for a reply, or for the end of the connection.
    pub(crate) fn wait(&self, limit: Duration) -> anyhow::Result<()> {
        let limit = Timespec::try_from(limit)?;
        match poll(
            &mut [PollFd::new(&self.connection, PollFlags::IN)],
            Some(&limit),
        ) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn exchange(
    path: &Path,
    body: RequestBody,
    fds: &[BorrowedFd<'_>],
) -> anyhow::Result<(ReplyBody, Vec<OwnedFd>)> {
    receive(&send(path, body, fds)?)
}

fn send(path: &Path, body: RequestBody, fds: &[BorrowedFd<'_>]) -> anyhow::Result<Connection> {
    let connection = Connection::connect(path)?;
    connection.send(
        &encode(&Request {
            id: REQUEST_ID,
            body,
        }),
        fds,
    )?;
    Ok(connection)
}

fn receive(connection: &Connection) -> anyhow::Result<(ReplyBody, Vec<OwnedFd>)> {
    let patience = Timespec::try_from(TIMEOUT)?;
    if poll(
        &mut [PollFd::new(connection, PollFlags::IN)],
        Some(&patience),
    )? == 0
    {
        bail!("the server does not answer");
    }
    let mut buffer = vec![0; MAX_MESSAGE];
    let received = connection.receive(&mut buffer)?;
    match decode::<Reply>(&buffer[..received.length])? {
        Reply {
            id: REQUEST_ID,
            body: ReplyBody::Error { errno },
        } => Err(Errno::from_raw_os_error(errno).into()),
        Reply {
            id: REQUEST_ID,
            body,
        } => Ok((body, received.fds.into_iter().collect())),
        _ => bail!("the server answered another request"),
    }
}

/// The error for a reply that does not belong to the request.
pub(crate) fn unexpected() -> Failure {
    Failure::NoServer(anyhow::anyhow!(
        "the server's answer is not one to this question; is it of another version?"
    ))
}
