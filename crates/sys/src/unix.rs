//! UNIX sockets: the control connection between library and server, and the socket pairs behind
//! descriptors. Messages keep their boundaries and carry descriptors. Only `connect` blocks, for a
//! limited time: other calls that would block return `Blocked`, and the caller polls.

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
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrAny, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, connect as connect_socket, getpeername,
    getsockname, listen, recvmsg, sendmsg, shutdown, socket_with, socketpair, sockopt,
};

use crate::descriptor::set_socket_option;
use crate::raw;
use crate::wait::{pollfd, ppoll};

/// Maximum number of descriptors in one message.
pub const MAX_FDS: usize = 8;

/// Maximum number of descriptors that the kernel permits in one message.
const SCM_MAX_FD: usize = 253;

/// Queue length for `accept`.
const BACKLOG: i32 = 512;

/// How long `connect` waits for room in that queue, which anybody can fill.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// Send buffer with room for a few of the longest messages; the kernel limits it to `net.core.wmem_max`.
const SEND_BUFFER: usize = 1024 * 1024;

/// Credentials of the peer, as the kernel recorded them when the connection was made.
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
    /// No socket there, or nobody listens on it.
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

/// A received message; its bytes and descriptors are in the caller's buffers.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub length: usize,
    /// As in [`Received`], but the descriptors for which there was room are kept.
    pub is_short: bool,
}

/// A received message; its bytes are in the caller's buffer.
#[derive(Debug)]
pub struct Received {
    pub length: usize,
    /// Empty if `is_short`.
    pub fds: ArrayVec<OwnedFd, MAX_FDS>,
    /// The message carried more descriptors than there was room for, in this process (`EMFILE`) or on
    /// the host (`ENFILE`), or than [`MAX_FDS`]: they are closed.
    pub is_short: bool,
}

/// The server's socket at a well-known path; removes the path when dropped.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: Option<PathBuf>,
}

impl Listener {
    /// Listens on `path`, open to every user, and creates its parent directories. Replaces the socket of
    /// a dead server.
    pub fn bind(path: &Path) -> Result<Listener, BindError> {
        let address = SocketAddrUnix::new(path).map_err(|_| BindError::BadPath(path.to_owned()))?;
        make_directories(path)?;
        remove_leftover(path)?;
        let listening = || {
            let fd = seqpacket_socket()?;
            bind(&fd, &address)?;
            // Every user may connect; the server checks credentials.
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
            path: Some(path.to_owned()),
        })
    }

    /// Leaves the path, as if the server had died.
    pub fn leave_path(&mut self) {
        self.path = None;
    }

    /// Accepts the next pending connection.
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
        // It may have been removed already.
        let _ = self.path.as_ref().map(unlink);
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

/// Unlinks the socket of a dead server; fails if a server is alive.
fn remove_leftover(path: &Path) -> Result<(), BindError> {
    match Connection::connect(path) {
        Err(ConnectError::NoServer) => match lstat(path) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) != FileType::Socket => {
                Err(BindError::Occupied(path.to_owned()))
            }
            _ => {
                // It does not matter if there is nothing to unlink.
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
        // A smaller buffer than requested only makes senders wait earlier.
        let _ = sockopt::set_socket_send_buffer_size(&fd, SEND_BUFFER);
        Connection { fd }
    }

    /// Sends one message as a whole, or nothing.
    pub fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        send(&self.fd, message, fds)
    }

    /// Whether the peer has not read everything sent to it.
    pub fn has_unread(&self) -> bool {
        // SAFETY: the request writes one `int`, the number of bytes queued.
        let waiting = unsafe { ioctl(&self.fd, Getter::<OUTPUT_QUEUE, i32>::new()) };
        waiting.is_ok_and(|bytes| bytes > 0)
    }

    /// Ends what the peer may send, and discards what it has sent up to the first message with descriptors. Returns
    /// whether nothing is left: then a close of the connection closes no descriptors of others.
    pub fn discard_unread(&self) -> bool {
        /// Beyond what fits into the queue, by the number of messages and of bytes.
        const MOST: usize = 1024;
        // Fails only if the peer has gone.
        let _ = shutdown(&self.fd, Shutdown::Read);
        // Then even an empty message differs from the end.
        if sockopt::set_socket_passcred(&self.fd, true).is_err() {
            return false;
        }
        for _ in 0..MOST {
            match receive_none(&self.fd, RecvFlags::PEEK) {
                Ok(Next::End) => return true,
                Ok(Next::Message) => {
                    let _ = receive_none(&self.fd, RecvFlags::empty());
                }
                Ok(Next::WithDescriptors) | Err(_) => return false,
            }
        }
        false
    }

    /// See [`receive_all`].
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

/// Waits in the kernel for room in the server's queue, in turn; the returned socket does not block.
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

/// The kind of a socket pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairKind {
    /// Bytes, as of a relayed TCP session.
    Stream,
    /// Messages, as a listener's accepted sessions or a UDP session's datagrams.
    SeqPacket,
}

/// Creates a connected pair, close-on-exec and in blocking mode, as for new descriptors.
pub fn socket_pair(kind: PairKind) -> Result<(OwnedFd, OwnedFd), Errno> {
    let socket_type = match kind {
        PairKind::Stream => SocketType::STREAM,
        PairKind::SeqPacket => SocketType::SEQPACKET,
    };
    socketpair(AddressFamily::UNIX, socket_type, SocketFlags::CLOEXEC, None)
}

/// Creates a socket without a peer yet. For `SeqPacket` it is a datagram socket: polling it does not report a hang-up.
pub fn without_peer(kind: PairKind) -> Result<OwnedFd, Errno> {
    let socket_type = match kind {
        PairKind::Stream => SocketType::STREAM,
        PairKind::SeqPacket => SocketType::DGRAM,
    };
    socket_with(AddressFamily::UNIX, socket_type, SocketFlags::CLOEXEC, None)
}

/// Sends one message through any UNIX socket, without blocking and without SIGPIPE. On a message
/// socket it is sent as a whole.
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

/// Like [`receive`], from a sender that may have sent as many descriptors as a message can carry: all of them are added
/// to `fds`, even on failure, so that none is closed here.
pub fn receive_all(
    fd: impl AsFd,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<Message, ReceiveError> {
    receive_with(fd, RecvFlags::empty(), buffer, fds)
}

/// Has [`peek_all`] return the first message next, and then each one behind the last (`SO_PEEK_OFF`).
pub fn peek_from_first(fd: impl AsFd) -> Result<(), Errno> {
    let start = 0_i32.to_ne_bytes();
    set_socket_option(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &start)
}

/// Like [`receive_all`], but the messages stay, with their descriptors.
pub fn peek_all(
    fd: impl AsFd,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<Message, ReceiveError> {
    receive_with(fd, RecvFlags::PEEK, buffer, fds)
}

fn receive_with(
    fd: impl AsFd,
    how: RecvFlags,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<Message, ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | how;
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
    // Empty messages are never sent, so this is the end.
    if message.bytes == 0 {
        return Err(ReceiveError::Closed);
    }
    Ok(Message {
        length: message.bytes,
        is_short,
    })
}

/// What is first in the queue of a UNIX message socket.
enum Next {
    Message,
    WithDescriptors,
    End,
}

/// Receives a message into no memory, from a socket that asks for credentials.
fn receive_none(fd: impl AsFd, how: RecvFlags) -> Result<Next, Errno> {
    // `rustix` has no process 0, which the sender is whose credentials were not kept.
    #[repr(C)]
    struct Credentials {
        header: libc::cmsghdr,
        credentials: libc::ucred,
    }
    let mut space = MaybeUninit::<Credentials>::uninit();
    // SAFETY: all fields may be zero.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_control = space.as_mut_ptr().cast();
    header.msg_controllen = size_of::<Credentials>();
    let flags = RecvFlags::DONTWAIT | how;
    // SAFETY: the kernel writes to `header` and `space`, which live until it returns.
    let length = unsafe {
        raw::syscall(
            libc::SYS_recvmsg,
            [
                fd.as_fd().as_raw_fd() as usize,
                (&raw mut header).expose_provenance(),
                flags.bits() as usize,
                0,
                0,
                0,
            ],
        )?
    };
    Ok(if header.msg_flags & libc::MSG_CTRUNC != 0 {
        Next::WithDescriptors
    } else if length > 0 || header.msg_controllen > 0 {
        Next::Message
    } else {
        Next::End
    })
}

/// Whether it is a socket or a memfd. Does not call into a file system, whose server might not answer.
pub fn is_socket_or_memory(fd: impl AsFd) -> bool {
    sockopt::socket_domain(&fd).is_ok() || rustix::fs::fcntl_get_seals(&fd).is_ok()
}

/// Whether the last close of `fd` may block at the discretion of others. Closing a socket whose queue others can fill
/// may block, too, but only as long as closing what it carries.
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

/// Whether the queue of a UNIX socket is empty. A closed peer looks like a message; for a stream the two are
/// told apart.
pub fn is_empty(fd: impl AsFd) -> bool {
    let mut fds = [pollfd(fd.as_fd().as_raw_fd(), libc::POLLIN)];
    let is_quiet = ppoll(&mut fds, Some(Instant::ZERO), None) == Ok(0);
    is_quiet || fds[0].revents & libc::POLLHUP != 0 && has_ended(fd)
}

/// Not by a peek, which would wait for a thread that reads the stream into memory that is not available (`iolock`).
fn has_ended(stream: impl AsFd) -> bool {
    sockopt::socket_type(&stream) == Ok(SocketType::STREAM)
        && rustix::io::ioctl_fionread(stream) == Ok(0)
}

/// Is the last copy of the other end closed?
pub fn has_hung_up(fd: impl AsFd) -> bool {
    let mut fds = [pollfd(fd.as_fd().as_raw_fd(), 0)];
    let looked = ppoll(&mut fds, Some(Instant::ZERO), None);
    looked.is_ok() && fds[0].revents & (libc::POLLHUP | libc::POLLERR) != 0
}

/// Makes the end of a pair reject descriptors from its peer (`SO_PASSRIGHTS`, Linux 6.16). Returns false if the kernel
/// does not support that.
pub fn refuse_descriptors(fd: impl AsFd) -> bool {
    const PASS_RIGHTS: i32 = 83;
    set_socket_option(fd, libc::SOL_SOCKET, PASS_RIGHTS, &0_i32.to_ne_bytes()).is_ok()
}

/// The kernel's identifier of the socket (`SO_COOKIE`): unique until the host reboots, and the same for every
/// descriptor of the socket.
pub fn cookie(fd: impl AsFd) -> Result<u64, Errno> {
    sockopt::socket_cookie(fd)
}

/// Whether the socket preserves message boundaries.
pub fn carries_messages(fd: impl AsFd) -> bool {
    sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
}

/// Whether `fd` is one end of a pair made by `socketpair`. Unlike connections, those have no name on
/// either side.
pub fn is_pair_end(fd: impl AsFd) -> bool {
    // The address of an unnamed socket is the family alone.
    let is_nameless = |name: Result<Option<SocketAddrAny>, Errno>| {
        name.ok().flatten().is_some_and(|name| {
            name.address_family() == AddressFamily::UNIX
                && name.addr_len() as usize == size_of::<libc::sa_family_t>()
        })
    };
    // Getting the name of an internet socket takes a lock that a sender may hold.
    sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
        && is_nameless(getsockname(&fd).map(Some))
        && is_nameless(getpeername(&fd))
}

/// Credentials of the process that connected or made the pair (`SO_PEERCRED`).
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
