//! Contents of libraries' requests, and their results.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use portolan_control::{Charge, ClientId, RequestedState};
use portolan_proto::control::{
    FastOpenMode, HandshakeOptions, ListPart, ReplyBody, RequestBody, Reuse, SocketOptionsBlob,
};
use portolan_types::{Instant, Protocol, SessionId, Slot};

use crate::calls::Call;

/// What a request leads to.
pub(crate) enum Answer {
    Reply(ReplyBody, Vec<OwnedFd>),
    /// The bytes of a list, and the reply that brings a part of them.
    List(Vec<u8>, fn(ListPart) -> ReplyBody),
    Silence,
    /// The reply is sent when the session's holder has given it back.
    Recall(SessionId, RequestedState),
    /// The reply comes when what the request waits for is closed here.
    AfterCloses(AwaitedClose),
    /// The reply comes when a thread has made the call.
    Call(Call),
    /// The reply comes when there is a channel for the program.
    Channel(String, Option<Charge>),
}

impl From<ReplyBody> for Answer {
    fn from(body: ReplyBody) -> Answer {
        Answer::Reply(body, Vec::new())
    }
}

/// A session and its descriptor, as shown by a process.
#[derive(Debug)]
pub(crate) struct ShownSession {
    pub id: SessionId,
    pub slot: Slot,
    pub near: OwnedFd,
}

/// What a request waits for the end of, and the request.
#[derive(Debug)]
pub(crate) enum AwaitedClose {
    /// A `Cache`: copies of its descriptor.
    Descriptor(ShownSession),
    /// A `Bind`: the kernel socket that held the port before.
    Port(u16, RequestBody, Vec<OwnedFd>),
}

/// A request that waits for that.
#[derive(Debug)]
pub(crate) struct PendingClose {
    pub client: ClientId,
    pub uid: u32,
    pub request: u32,
    pub awaited: AwaitedClose,
    pub until: Instant,
}

/// A new session's descriptor, as sent with a request.
#[derive(Debug)]
pub(crate) struct NewDescriptor {
    pub far: OwnedFd,
    pub cookie: u64,
}

/// A requested local endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BindRequest {
    pub protocol: Protocol,
    pub local: SocketAddr,
    pub reuse: Reuse,
    pub v6_only: bool,
}

/// A requested peer.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub protocol: Protocol,
    pub remote: SocketAddr,
    pub slot: Slot,
    pub options: HandshakeOptions,
    pub early: FastOpenMode,
}

/// The parameters of `listen`.
#[derive(Debug)]
pub(crate) struct Listening {
    pub backlog: u32,
    pub options: HandshakeOptions,
    pub options_blob: SocketOptionsBlob,
    /// The slot for the port's segments, if the process offers to perform the handshakes itself.
    pub slot: Option<Slot>,
}

/// A connection that a library has opened, as it reports it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claimed {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub slot: Slot,
}
