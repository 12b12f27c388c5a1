//! Guarantees for this program: rates for what it sends, budgets for what it receives, CPU time for its threads, and
//! groups that share a reserved rate. Each call is one request to the server, which grants or refuses it; this side
//! keeps no state.
//!
//! `<portolan/qos.h>` is the same interface for C.
//!
//! ```no_run
//! use portolan::net::TcpStream;
//! use portolan::qos::{Kind, Rate, Slack, Transmit, Whom, release, reserve};
//! use std::os::fd::AsRawFd;
//!
//! let stream = TcpStream::connect("192.0.2.7:7").expect("a server");
//! let whom = Whom::Socket(stream.as_raw_fd());
//! let spec = Transmit {
//!     device: None,
//!     rate: Rate::Bits(20_000_000),
//!     burst: None,
//!     slack: Slack::None,
//! };
//! match reserve(whom, spec) {
//!     Ok(()) => release(whom, Kind::Transmit)?,
//!     Err(refused) => eprintln!("not granted: {refused}"),
//! }
//! # Ok::<(), portolan::qos::Refused>(())
//! ```
//!
//! # Errors
//! All calls fail with `CONNREFUSED` if there is no server, `NETDOWN` if it has gone, `PERM` if the configuration does not
//! permit the request, and `BUSY` or `NOSPC` if the rate is not available. [`Refused::reason`] says which check failed.
#![warn(missing_docs)]

use std::fmt;
use std::os::fd::{OwnedFd, RawFd};

use portolan_proto::control::{ReplyBody, RequestBody};
pub use portolan_proto::qos::{Adapt, Cpu, GroupOptions, Kind, Rate, Receive, Slack, Transmit};
use portolan_proto::qos::{Algorithm, GroupAction, QosReply, QosRequest, Refusal, Scope};
use portolan_types::FlowKey;
use rustix::io::Errno;

use crate::descriptors;
use crate::migration::registration::register_at;
use crate::posix::{attach, local_address, peer_address};
use crate::process::Process;
use crate::process::control::Lost;
use crate::socket::table;
use crate::threads::start::start_to_stay;

/// Maximum length of a device's or service class's name.
const NAME_MAX: usize = 255;

/// The subject of a guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// All sessions and threads of this process.
    Process,
    /// The connection of a socket; without a peer, its port.
    Socket(RawFd),
    /// The calling thread; for CPU time.
    Thread,
}

/// The requested guarantee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guarantee {
    /// A rate for what is sent.
    Transmit(Transmit),
    /// A budget for what is received.
    Receive(Receive),
    /// CPU time.
    Cpu(Cpu),
}

impl From<Transmit> for Guarantee {
    fn from(spec: Transmit) -> Guarantee {
        Guarantee::Transmit(spec)
    }
}

impl From<Receive> for Guarantee {
    fn from(spec: Receive) -> Guarantee {
        Guarantee::Receive(spec)
    }
}

impl From<Cpu> for Guarantee {
    fn from(spec: Cpu) -> Guarantee {
        Guarantee::Cpu(spec)
    }
}

/// A request that was not granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The closest error number.
    pub errno: Errno,
    /// The failed check and the value that would have passed it, in the server's words.
    pub reason: String,
}

impl Refused {
    /// Makes a refusal with a reason in words.
    pub fn new(errno: Errno, reason: impl Into<String>) -> Refused {
        Refused {
            errno,
            reason: reason.into(),
        }
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Refused {
        Refused::new(Errno::from_raw_os_error(refusal.errno), refusal.reason)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Refused {}

/// Makes a guarantee, or changes the existing one of this kind.
///
/// # Errors
/// Besides those of the [module](self): `NOTSOCK`, the descriptor is not one of Portolan's sockets; `INVAL`, the socket has
/// neither a peer nor a port, or a number is out of its range; `NAMETOOLONG`.
pub fn reserve(whom: Whom, spec: impl Into<Guarantee>) -> Result<(), Refused> {
    let scope = scope(whom)?;
    let request = match spec.into() {
        Guarantee::Transmit(spec) => {
            is_short(spec.device.as_deref())?;
            QosRequest::Transmit { scope, spec }
        }
        Guarantee::Receive(spec) => QosRequest::Receive { scope, spec },
        Guarantee::Cpu(spec) => {
            is_short(spec.class.as_deref())?;
            QosRequest::Cpu { scope, spec }
        }
    };
    ask(request).map(drop)
}

/// Ends a guarantee.
///
/// # Errors
/// Besides those of the [module](self): `NOENT`, there is none of this kind.
pub fn release(whom: Whom, kind: Kind) -> Result<(), Refused> {
    let scope = scope(whom)?;
    ask(QosRequest::Delete { scope, kind }).map(drop)
}

/// A group of flows that share a reserved rate, named by a key that is unique on this host (MS
/// Table I). The server keeps the group: dropping this value does not delete it.
///
/// ```no_run
/// use portolan::qos::{GroupOptions, MultiplexGroup, Whom};
///
/// // 10 Mb/s for all members together, of which this process has 2.
/// let options = GroupOptions { share: true, ..GroupOptions::default() };
/// let group = MultiplexGroup::create(7, 10_000_000, None, options, 0o750)?;
/// let member = group.join(Whom::Process, 2_000_000)?;
/// group.leave(member)?;
/// group.delete()?;
/// # Ok::<(), portolan::qos::Refused>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiplexGroup {
    key: u32,
}

/// A member of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member(pub u32);

impl MultiplexGroup {
    /// Makes a group with `bits` per second of a link. `mode` has the form of a file's mode: the
    /// right to join (execute), inspect (read) and change the group (write).
    ///
    /// # Errors
    /// Besides those of the [module](self): `EXIST`, there is a group with this key.
    pub fn create(
        key: u32,
        bits: u64,
        device: Option<&str>,
        options: GroupOptions,
        mode: u16,
    ) -> Result<MultiplexGroup, Refused> {
        is_short(device)?;
        let group = MultiplexGroup::named(key);
        group.ask(GroupAction::Create {
            device: device.map(str::to_owned),
            bits,
            mode,
            options,
            algorithm: Algorithm::default(),
        })?;
        Ok(group)
    }

    /// Names a group without checking that it exists; later calls fail if it does not.
    pub fn named(key: u32) -> MultiplexGroup {
        MultiplexGroup { key }
    }

    /// Opens an existing group, which this process must have the right to join.
    ///
    /// # Errors
    /// Besides those of the [module](self): `NOENT`, there is none with this key; `ACCESS`.
    pub fn open(key: u32) -> Result<MultiplexGroup, Refused> {
        let group = MultiplexGroup::named(key);
        group.ask(GroupAction::Open)?;
        Ok(group)
    }

    /// Replaces all options.
    ///
    /// # Errors
    /// As [`MultiplexGroup::open`], for the right to change it.
    pub fn set_options(&self, options: GroupOptions) -> Result<(), Refused> {
        self.ask(GroupAction::SetOptions(options)).map(drop)
    }

    /// Changes the group's rate, in bits per second, which is admitted like that of a new group.
    ///
    /// # Errors
    /// As [`MultiplexGroup::open`], for the right to change it.
    pub fn set_rate(&self, bits: u64) -> Result<(), Refused> {
        self.ask(GroupAction::SetRate { bits }).map(drop)
    }

    /// Adds a flow, or all flows of this process, with `bits` per second for the member itself.
    ///
    /// # Errors
    /// As [`reserve`] and [`MultiplexGroup::open`].
    pub fn join(&self, whom: Whom, bits: u64) -> Result<Member, Refused> {
        let scope = scope(whom)?;
        match self.ask(GroupAction::Join { scope, bits })? {
            QosReply::Joined { member } => Ok(Member(member)),
            _ => Err(unexpected()),
        }
    }

    /// Removes a member.
    ///
    /// # Errors
    /// Besides those of the [module](self): `NOENT`, the group or the member is gone.
    pub fn leave(&self, Member(member): Member) -> Result<(), Refused> {
        self.ask(GroupAction::Leave { member }).map(drop)
    }

    /// Deletes the group, and with it the rates of its members.
    ///
    /// # Errors
    /// As [`MultiplexGroup::open`], for the right to change it.
    pub fn delete(self) -> Result<(), Refused> {
        self.ask(GroupAction::Delete).map(drop)
    }

    fn ask(&self, action: GroupAction) -> Result<QosReply, Refused> {
        let key = self.key;
        ask(QosRequest::Group { key, action })
    }
}

fn scope(whom: Whom) -> Result<Scope, Refused> {
    match whom {
        // 0: the server knows the caller's pid, which may be another one in the caller's namespace.
        Whom::Process => Ok(Scope::Process { pid: 0 }),
        Whom::Thread => Ok(Scope::Thread {
            tid: portolan_sys::thread::number().unsigned_abs(),
        }),
        Whom::Socket(fd) => scope_of_socket(fd),
    }
}

fn scope_of_socket(fd: RawFd) -> Result<Scope, Refused> {
    if !descriptors::is_ours(fd) {
        attach(fd);
    }
    register_at(fd);
    let socket = table::socket(fd).ok_or_else(|| {
        Refused::new(
            Errno::NOTSOCK,
            format!("descriptor {fd} is not one of Portolan's sockets"),
        )
    })?;
    let protocol = socket.protocol;
    let local = match local_address(fd) {
        Ok(local) if local.port() != 0 => local,
        _ => {
            return Err(Refused::new(
                Errno::INVAL,
                "the socket has neither a peer nor a port",
            ));
        }
    };
    Ok(match peer_address(fd) {
        Ok(remote) => Scope::Flow(FlowKey {
            protocol,
            local,
            remote,
        }),
        _ => Scope::Port {
            protocol,
            port: local.port(),
        },
    })
}

/// Refuses names that no message can carry; sending one would cost the connection to the server.
fn is_short(name: Option<&str>) -> Result<(), Refused> {
    match name {
        Some(name) if name.len() > NAME_MAX => {
            Err(Refused::new(Errno::NAMETOOLONG, "the name is too long"))
        }
        _ => Ok(()),
    }
}

fn ask(request: QosRequest) -> Result<QosReply, Refused> {
    match ask_server(RequestBody::Qos(request))? {
        (ReplyBody::Qos(QosReply::Refused(refusal)), _) => Err(refusal.into()),
        (ReplyBody::Qos(reply), _) => Ok(reply),
        _ => Err(unexpected()),
    }
}

/// Returns this process, which registers if it has not yet.
pub(crate) fn own_process() -> Result<&'static Process, Refused> {
    start_to_stay().map_err(|_| Refused::new(Errno::CONNREFUSED, "there is no server"))
}

/// Sends a request to the server. Returns the reply with its descriptors.
pub(crate) fn ask_server(request: RequestBody) -> Result<(ReplyBody, Vec<OwnedFd>), Refused> {
    match own_process()?.control.call(request, &[]) {
        Ok((ReplyBody::Error { errno }, _)) => {
            let errno = Errno::from_raw_os_error(errno);
            Err(Refused::new(errno, errno.to_string()))
        }
        Ok(answer) => Ok(answer),
        Err(Lost) => Err(Refused::new(Errno::NETDOWN, "the server has gone")),
    }
}

pub(crate) fn unexpected() -> Refused {
    Refused::new(Errno::PROTO, "the server gave no sensible answer")
}
