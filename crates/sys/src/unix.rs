//! UNIX sockets: the control connection between library and server, and the pairs that
//! descriptors are made of. Messages keep their boundaries and carry descriptors. Nothing here
//! blocks but `connect`, for a while: every other call that could says `Blocked`, and the caller polls.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use arrayvec::ArrayVec;
use portolan_types::Instant;
use rustix::fs::{FileType, Mode, chmod, lstat, mkdir, unlink};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrAny, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, connect as connect_socket, getpeername,
    getsockname, listen, recvmsg, sendmsg, socket_with, socketpair, sockopt,
};

use crate::descriptor::set_socket_option;
use crate::wait::ppoll;

/// Descriptors that one message may carry.
pub const MAX_FDS: usize = 8;

/// Descriptors that the kernel lets one message carry.
const SCM_MAX_FD: usize = 253;

/// Connections that wait for `accept`.
const BACKLOG: i32 = 512;

/// How long whoever connects waits for room in that queue, which anybody can fill.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// Room for a few of the longest messages; the kernel caps it at `net.core.wmem_max`.
const SEND_BUFFER: usize = 1024 * 1024;

/// Who is at the other end, as the kernel saw it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    pub pid: u32,
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("socket path {0} is too long")]
    BadPath(PathBuf),
    #[error("another server listens on {0}")]
    InUse(PathBuf),
    #[error("{0} is another file, not a socket: it stays as it is")]
    Occupied(PathBuf),
    #[error("cannot create the directory {path}: {errno}")]
    Directory { path: PathBuf, errno: Errno },
    #[error("cannot listen on {path}: {errno}")]
    Listen { path: PathBuf, errno: Errno },
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// No socket there, or nobody who listens on it.
    #[error("no server listens")]
    NoServer,
    #[error("cannot connect: {0}")]
    Failed(Errno),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    #[error("nobody waits")]
    Blocked,
    #[error("cannot accept: {0}")]
    Failed(Errno),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The peer reads too slowly; poll for POLLOUT.
    #[error("the peer's queue is full")]
    Blocked,
    #[error("the peer has gone")]
    Closed,
    #[error("a message carries at most {MAX_FDS} descriptors")]
    TooManyFds,
    #[error("cannot send: {0}")]
    Failed(Errno),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    #[error("no message waits")]
    Blocked,
    #[error("the peer has gone")]
    Closed,
    /// The message was longer than the buffer; it is lost.
    #[error("the message did not fit")]
    Truncated,
    #[error("cannot receive: {0}")]
    Failed(Errno),
}

/// One message; its bytes and descriptors are where the caller wants them.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub length: usize,
    /// As of [`Received`], but descriptors that there was room for are there.
    pub is_short: bool,
}

/// What one receive brought; the bytes are in the caller's buffer.
#[derive(Debug)]
pub struct Received {
    pub length: usize,
    /// None of them if `is_short`.
    pub fds: ArrayVec<OwnedFd, MAX_FDS>,
    /// The message carried descriptors that there was no room for, in this process (`EMFILE`) or on
    /// the host (`ENFILE`), or more than [`MAX_FDS`]: they are closed.
    pub is_short: bool,
}

/// The server's end of a well-known path; removes the path when dropped.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
}

impl Listener {
    /// Listens on `path`, open to every user, and makes the directories above it. A socket that a
    /// dead server left there is replaced.
    pub fn bind(path: &Path) -> Result<Listener, BindError> {
        let address = SocketAddrUnix::new(path).map_err(|_| BindError::BadPath(path.to_owned()))?;
        make_directories(path)?;
        remove_leftover(path)?;
        let listening = || {
            let fd = seqpacket_socket()?;
            bind(&fd, &address)?;
            // Every user may connect; the server judges by credentials.
            chmod(path, Mode::from_raw_mode(0o666))?;
            listen(&fd, BACKLOG)?;
            Ok(fd)
        };
        let fd = listening().map_err(|errno| BindError::Listen {
            path: path.to_owned(),
            errno,
        })?;
        Ok(Listener {
            fd,
            path: path.to_owned(),
        })
    }

    /// The next connection that waits.
    pub fn accept(&self) -> Result<(Connection, Credentials), AcceptError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = match accept_with(&self.fd, flags) {
            Ok(fd) => fd,
            Err(Errno::AGAIN) => return Err(AcceptError::Blocked),
            Err(errno) => return Err(AcceptError::Failed(errno)),
        };
        let connection = Connection::new(fd);
        let credentials = peer_credentials(&connection).map_err(AcceptError::Failed)?;
        Ok((connection, credentials))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Somebody may have removed it already.
        let _ = unlink(&self.path);
    }
}

fn make_directories(path: &Path) -> Result<(), BindError> {
    let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
    above.reverse();
    for directory in above {
        if directory.as_os_str().is_empty() || directory.is_dir() {
            continue;
        }
        match mkdir(directory, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => {
                return Err(BindError::Directory {
                    path: directory.to_owned(),
                    errno,
                });
            }
        }
    }
    Ok(())
}

/// Unlinks the socket of a server that is dead; refuses if one is alive.
fn remove_leftover(path: &Path) -> Result<(), BindError> {
    match Connection::connect(path) {
        Err(ConnectError::NoServer) => match lstat(path) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) != FileType::Socket => {
                Err(BindError::Occupied(path.to_owned()))
            }
            _ => {
                // If there is nothing to unlink, so much the better.
                let _ = unlink(path);
                Ok(())
            }
        },
        Ok(_) | Err(ConnectError::Failed(Errno::AGAIN)) => Err(BindError::InUse(path.to_owned())),
        Err(ConnectError::Failed(errno)) => Err(BindError::Listen {
            path: path.to_owned(),
            errno,
        }),
    }
}

/// One end of a control connection.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
}

impl Connection {
    /// Connects to the server that listens on `path`.
    pub fn connect(path: &Path) -> Result<Connection, ConnectError> {
        let address = SocketAddrUnix::new(path).map_err(ConnectError::Failed)?;
        match connect_patiently(&address) {
            Ok(fd) => Ok(Connection::new(fd)),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Err(ConnectError::NoServer),
            Err(errno) => Err(ConnectError::Failed(errno)),
        }
    }

    fn new(fd: OwnedFd) -> Connection {
        // A smaller buffer than asked for only means that senders wait earlier.
        let _ = sockopt::set_socket_send_buffer_size(&fd, SEND_BUFFER);
        Connection { fd }
    }

    /// Sends one message, whole or not at all.
    pub fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        send(&self.fd, message, fds)
    }

    /// Has the other side left something unread that was sent to it?
    pub fn has_unread(&self) -> bool {
        // SAFETY: the request writes one `int`, the bytes that wait.
        let waiting = unsafe { ioctl(&self.fd, Getter::<OUTPUT_QUEUE, i32>::new()) };
        waiting.is_ok_and(|bytes| bytes > 0)
    }

    /// As [`receive_all`].
    pub fn receive_all(
        &self,
        buffer: &mut [u8],
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Message, ReceiveError> {
        receive_all(&self.fd, buffer, fds)
    }

    /// Receives one message into `buffer`.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<Received, ReceiveError> {
        receive(&self.fd, buffer)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<OwnedFd> for Connection {
    fn from(fd: OwnedFd) -> Connection {
        Connection::new(fd)
    }
}

impl From<Connection> for OwnedFd {
    fn from(connection: Connection) -> OwnedFd {
        connection.fd
    }
}

fn seqpacket_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Waits in the kernel for room in the server's queue, in turn with all who do; does not block any more when it returns.
fn connect_patiently(address: &SocketAddrUnix) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(CONNECT_PATIENCE))?;
    retry_on_intr(|| connect_socket(&fd, address))?;
    ioctl_fionbio(&fd, true)?;
    Ok(fd)
}

/// `SIOCOUTQ`.
const OUTPUT_QUEUE: Opcode = 0x5411;

/// What a pair carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairKind {
    /// Bytes, as a relayed TCP session does.
    Stream,
    /// Messages, as a listener's accepted sessions or a UDP session's datagrams are.
    SeqPacket,
}

/// A connected pair, close-on-exec and in blocking mode, as descriptors are born.
pub fn socket_pair(kind: PairKind) -> Result<(OwnedFd, OwnedFd), Errno> {
    let socket_type = match kind {
        PairKind::Stream => SocketType::STREAM,
        PairKind::SeqPacket => SocketType::SEQPACKET,
    };
    socketpair(AddressFamily::UNIX, socket_type, SocketFlags::CLOEXEC, None)
}

/// A socket that has no peer yet. One of `SeqPacket` is of datagrams: no look at it shows a hang-up.
pub fn without_peer(kind: PairKind) -> Result<OwnedFd, Errno> {
    let socket_type = match kind {
        PairKind::Stream => SocketType::STREAM,
        PairKind::SeqPacket => SocketType::DGRAM,
    };
    socket_with(AddressFamily::UNIX, socket_type, SocketFlags::CLOEXEC, None)
}

/// Sends one message through any UNIX socket, without blocking and without SIGPIPE. On a message
/// socket all of it is sent.
pub fn send(fd: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(SendError::TooManyFds);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(fd, &[IoSlice::new(message)], &mut ancillary, flags) {
        Ok(_) => Ok(()),
        Err(Errno::AGAIN) => Err(SendError::Blocked),
        Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(SendError::Closed),
        Err(errno) => Err(SendError::Failed(errno)),
    }
}

/// Receives one message from any UNIX message socket, without blocking. The received descriptors
/// are close-on-exec.
pub fn receive(fd: impl AsFd, buffer: &mut [u8]) -> Result<Received, ReceiveError> {
    let mut all = Vec::new();
    let Message { length, is_short } = receive_all(fd, buffer, &mut all)?;
    if all.len() > MAX_FDS {
        return Err(ReceiveError::Truncated);
    }
    if is_short {
        all.clear();
    }
    Ok(Received {
        length,
        fds: all.into_iter().collect(),
        is_short,
    })
}

/// As [`receive`], from somebody who may have sent as many descriptors as a message can carry: all of them are in `fds`
/// afterwards, also when it fails, so that none is closed in here.
pub fn receive_all(
    fd: impl AsFd,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<Message, ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = match recvmsg(fd, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags) {
        Ok(message) => message,
        Err(Errno::AGAIN) => return Err(ReceiveError::Blocked),
        Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(ReceiveError::Closed),
        Err(errno) => return Err(ReceiveError::Failed(errno)),
    };
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(ReceiveError::Truncated);
    }
    let is_short = message.flags.contains(ReturnFlags::CTRUNC);
    // Nobody sends empty messages, so this is the end.
    if message.bytes == 0 {
        return Err(ReceiveError::Closed);
    }
    Ok(Message {
        length: message.bytes,
        is_short,
    })
}

/// Is it a socket, or memory? Asks nobody who serves a file system.
pub fn is_socket_or_memory(fd: impl AsFd) -> bool {
    sockopt::socket_domain(&fd).is_ok() || rustix::fs::fcntl_get_seals(&fd).is_ok()
}

/// May the last close of `fd` take as long as somebody else likes? A socket whose queue is others' to fill may, too, but
/// only as long as what it carries.
pub fn may_wait_when_closed(fd: impl AsFd) -> bool {
    match sockopt::socket_linger(&fd) {
        Ok(linger) => linger.is_some(),
        Err(_) => !is_socket_or_memory(fd),
    }
}

/// Does a close of the socket wait for nothing, whatever was set? So it is of UNIX sockets without a message that could carry
/// descriptors. A datagram socket of the internet leaves its groups first, and a listener resets what nobody has accepted.
pub fn closes_at_once(fd: impl AsFd) -> bool {
    sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX) && is_empty(fd)
}

pub fn is_datagram_socket(fd: impl AsFd) -> bool {
    sockopt::socket_type(fd) == Ok(SocketType::DGRAM)
}

/// Is no message in the queue of a UNIX socket? A peer that has gone shows as one does; of a stream the next read tells
/// them apart.
pub fn is_empty(fd: impl AsFd) -> bool {
    let mut fds = [libc::pollfd {
        fd: fd.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    }];
    let is_quiet = ppoll(&mut fds, Some(Instant::ZERO), None) == Ok(0);
    is_quiet || fds[0].revents & libc::POLLHUP != 0 && has_ended(fd)
}

/// A peek would wait for whoever reads the stream into memory that does not come (the kernel's `iolock`).
fn has_ended(stream: impl AsFd) -> bool {
    sockopt::socket_type(&stream) == Ok(SocketType::STREAM)
        && rustix::io::ioctl_fionread(stream) == Ok(0)
}

/// The end of a pair takes no descriptors from its peer from now on (`SO_PASSRIGHTS`, Linux 6.16). False where the kernel
/// lets them come.
pub fn refuse_descriptors(fd: impl AsFd) -> bool {
    const PASS_RIGHTS: i32 = 83;
    set_socket_option(fd, libc::SOL_SOCKET, PASS_RIGHTS, &0_i32.to_ne_bytes()).is_ok()
}

/// What the kernel calls this socket (`SO_COOKIE`): unique while the host runs, and the same for
/// every descriptor of the socket.
pub fn cookie(fd: impl AsFd) -> Result<u64, Errno> {
    sockopt::socket_cookie(fd)
}

/// Does a socket keep messages apart?
pub fn carries_messages(fd: impl AsFd) -> bool {
    sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
}

/// Is `fd` one end of a pair that `socketpair` made? Those, unlike connections, have no name on
/// either side.
pub fn is_pair_end(fd: impl AsFd) -> bool {
    // The address of a socket without a name is the family alone.
    let is_nameless = |name: Result<Option<SocketAddrAny>, Errno>| {
        name.ok().flatten().is_some_and(|name| {
            name.address_family() == AddressFamily::UNIX
                && name.addr_len() as usize == size_of::<libc::sa_family_t>()
        })
    };
    // Sockets of the internet take a lock to say their names, which whoever sends by them may hold.
    sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
        && is_nameless(getsockname(&fd).map(Some))
        && is_nameless(getpeername(&fd))
}

/// Who connected, or made the pair (`SO_PEERCRED`).
pub fn peer_credentials(fd: impl AsFd) -> Result<Credentials, Errno> {
    let peer = sockopt::socket_peercred(fd)?;
    Ok(Credentials {
        pid: peer.pid.as_raw_nonzero().get().unsigned_abs(),
        uid: peer.uid.as_raw(),
        gid: peer.gid.as_raw(),
    })
}

#[cfg(test)]
mod tests;
