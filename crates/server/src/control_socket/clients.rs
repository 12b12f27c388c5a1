//! Control connections: accept, read requests, send replies. Every message is considered hostile until it is
//! decoded and admitted; the server blocks on no client.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use portolan_control::{Adopted, Charge, ClientId, Command, Errno, Input, Requester, Timer};
use portolan_proto::control::{
    HandshakeOptions, ListPart, Reply, ReplyBody, Request, RequestBody, SessionRef,
};
use portolan_proto::extension::ExtensionRequest;
use portolan_proto::qos::QosRequest;
use portolan_proto::{MAX_MESSAGE, decode, encode};
use portolan_stack::NextHop;
use portolan_sys::unix::{AcceptError, Connection, Credentials, MAX_FDS, ReceiveError, SendError};
use portolan_sys::{clock, port_right};
use portolan_types::{ChannelId, FlowKey, Protocol, canonical};
use rustix::event::epoll::EventFlags;
use rustix::net::{Shutdown, shutdown};
use tracing::{debug, info};

use crate::calls::{Call, RequestId, Sequel};
use crate::channels::pool::PendingHello;
use crate::connections::rights::PortRight;
use crate::control_socket::client::{Client, OutgoingList, PendingReply};
use crate::control_socket::sink::Closes;
use crate::requests::{Answer, AwaitedClose, BindRequest, Claimed, Listening, Target};
use crate::server::{Server, Source};
use crate::user_threads::WaitsFor;

/// Replies queued for a client that does not read; above it the client is disconnected.
const WAITING_MAX: usize = 512;

/// Replies that are sent to one client before others have their turn.
const SENT_AT_ONCE: usize = 64;

/// Requests of one client before others have their turn.
const REQUESTS_PER_TURN: usize = 64;

/// Connections accepted before others have their turn.
const ACCEPTED_PER_TURN: usize = 64;

/// How often a user is looked at of whom much is still to be closed.
const CLOSES_INTERVAL: Duration = Duration::from_millis(5);

/// Number of a request without a reply.
pub(crate) const NO_REPLY: u32 = 0;

impl Server {
    /// Accepts waiting connections at the control socket.
    pub(crate) fn accept_clients(&mut self) {
        for _ in 0..ACCEPTED_PER_TURN {
            if !self.has_descriptors() {
                return self.accept_clients_later();
            }
            match self.listener.accept() {
                Ok((connection, credentials)) => self.welcome(connection, credentials),
                Err(AcceptError::Blocked) => return,
                Err(AcceptError::Failed(errno)) => {
                    debug!(%errno, "cannot accept a control connection");
                    return self.accept_clients_later();
                }
            }
        }
    }

    fn welcome(&mut self, connection: Connection, credentials: Credentials) {
        let charge = match self.sink.closes_of(credentials.uid) {
            Closes::Stick => None,
            Closes::Proceed | Closes::Lag => self.connections.charge(credentials.uid, 1).ok(),
        };
        let Some(charge) = charge else {
            self.control.counters.refused += 1;
            // It may contain messages already.
            return self.sink.close_connection(credentials.uid, connection);
        };
        let id = ClientId(self.next_client);
        self.next_client += 1;
        let added = self
            .poll
            .add(&connection, Source::Client(id), EventFlags::IN);
        let Ok(token) = added else {
            return self.sink.close_connection(credentials.uid, connection);
        };
        self.note_descriptor(&connection);
        self.clients.insert(
            id,
            Client {
                connection,
                token,
                credentials,
                channel: None,
                inherits: None,
                right: PortRight::Nothing,
                is_registering: false,
                is_throttled: false,
                waiting: VecDeque::new(),
                lists: VecDeque::new(),
                watched: EventFlags::IN,
                _charge: charge,
            },
        );
    }

    /// Handles a connection that is readable, writable or hung up.
    pub(crate) fn serve_client(&mut self, id: ClientId, flags: EventFlags) {
        if flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR) {
            self.send_waiting(id);
        }
        // A client that does not read its replies is not read either.
        let is_deaf = self
            .clients
            .get(&id)
            .is_some_and(|client| !client.waiting.is_empty());
        let is_readable = flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR);
        if !is_deaf && is_readable && !self.throttle(id) {
            self.read_client(id, REQUESTS_PER_TURN);
        }
    }

    /// Returns whether the connection must wait because its user's requests have used up their share of the time, or what
    /// came with them is still being closed.
    fn throttle(&mut self, id: ClientId) -> bool {
        let Some(client) = self.clients.get_mut(&id) else {
            return false;
        };
        if client.is_throttled {
            return true;
        }
        let uid = client.credentials.uid;
        let again = if self.sink.closes_of(uid) == Closes::Lag {
            self.now + CLOSES_INTERVAL
        } else if let Some(again) = self.shares.served_again(uid, self.now) {
            self.control.counters.shares_spent += 1;
            again
        } else {
            return false;
        };
        client.is_throttled = true;
        self.throttled.push(id);
        self.control.timers.arm_once(Timer::Shares, again);
        self.watch_client(id);
        true
    }

    fn watch_client(&mut self, id: ClientId) {
        if let Some(client) = self.clients.get_mut(&id) {
            let interest = client.interest();
            if std::mem::replace(&mut client.watched, interest) != interest {
                // Fails only for a descriptor that is not in the set; this one is.
                let _ = self.poll.modify(&client.connection, client.token, interest);
            }
        }
    }

    /// Resumes the connections of users who may take time again; the others keep waiting.
    pub(crate) fn read_throttled(&mut self) {
        for id in std::mem::take(&mut self.throttled) {
            if let Some(client) = self.clients.get_mut(&id) {
                client.is_throttled = false;
                // Pending requests are reported at once.
                self.watch_client(id);
            }
        }
    }

    /// Returns whether the user of the connection has used up its slice of this turn. The rest is read in the next one.
    pub(crate) fn has_spent_slice(&self, id: ClientId) -> bool {
        let client = self.clients.get(&id);
        client.is_some_and(|client| self.slices.is_spent(client.credentials.uid))
    }

    /// Reads up to `most` requests and answers them, within its user's slice of the turn.
    pub(crate) fn read_client(&mut self, id: ClientId, most: usize) {
        if self.are_requests_over {
            return;
        }
        let Some(uid) = self.clients.get(&id).map(|c| c.credentials.uid) else {
            return;
        };
        let mut before = clock::now();
        self.nested_reads += 1;
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(MAX_MESSAGE, 0);
        for _ in 0..most {
            if self.slices.is_spent(uid) {
                self.control.counters.slices_spent += 1;
                break;
            }
            if self.sink.closes_of(uid) == Closes::Stick {
                self.throw_out(id, "its descriptors do not close");
                break;
            }
            let Some(client) = self.clients.get(&id) else {
                break;
            };
            let mut fds = Vec::new();
            let received = client.connection.receive_all(&mut buffer, &mut fds);
            self.sink.screen(uid, &mut fds);
            match received {
                Ok(message) => match decode::<Request>(&buffer[..message.length]) {
                    // The server had no room for the descriptors in the message.
                    Ok(request) if message.is_short && request.id != NO_REPLY => {
                        self.refuse(id, request.id, Errno::MFILE);
                    }
                    Ok(request) if fds.len() <= MAX_FDS => self.handle(id, request, fds),
                    Ok(_) => self.throw_out(id, "too many descriptors"),
                    Err(_) => self.throw_out(id, "malformed message"),
                },
                Err(ReceiveError::Blocked) => break,
                Err(ReceiveError::Closed) => {
                    self.disconnect(id);
                    break;
                }
                Err(ReceiveError::Truncated | ReceiveError::Failed(_)) => {
                    self.throw_out(id, "unreadable message");
                    break;
                }
            }
            let after = clock::now();
            let took = after.since(before);
            self.slices.spend(uid, took);
            self.shares.spend(uid, took, after);
            before = after;
        }
        self.buffer = buffer;
        self.nested_reads -= 1;
    }

    /// Answers the requests that have been sent, and receives no others: a library repeats to the next server what has had no
    /// answer. Clients are not served from then on.
    pub(crate) fn read_last_requests(&mut self) {
        self.are_requests_over = true;
        // Those that connect now wait, and find the server gone.
        self.poll.remove(&self.listener, self.control_token);
        let mut buffer = vec![0; MAX_MESSAGE];
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            let Some(client) = self.clients.get(&id) else {
                continue;
            };
            let uid = client.credentials.uid;
            self.poll.remove(&client.connection, client.token);
            // Fails only if the client has gone.
            let _ = shutdown(&client.connection, Shutdown::Read);
            let mut fds = Vec::new();
            while let Some(client) = self.clients.get(&id)
                && let Ok(message) = client.connection.receive_all(&mut buffer, &mut fds)
                && let Ok(request) = decode::<Request>(&buffer[..message.length])
            {
                let mut brought = std::mem::take(&mut fds);
                self.sink.screen(uid, &mut brought);
                if message.is_short || brought.len() > MAX_FDS {
                    break;
                }
                self.handle(id, request, brought);
            }
        }
    }

    fn handle(&mut self, id: ClientId, request: Request, fds: Vec<OwnedFd>) {
        self.control.counters.requests += 1;
        let Request { id: number, body } = request;
        let answer = self.perform(id, number, body, fds);
        self.answer((id, number), answer);
    }

    /// Sends the answer to a request, or sees to it that it is sent.
    pub(crate) fn answer(&mut self, (id, number): RequestId, answer: Result<Answer, Errno>) {
        let (body, fds) = match answer {
            Ok(Answer::Reply(body, fds)) => (body, fds),
            Ok(Answer::List(bytes, body)) => return self.send_list((id, number), bytes, body),
            Ok(Answer::Silence) => return,
            // The next server is asked again.
            Ok(Answer::Recall(..)) if self.is_stopping() => return,
            Ok(Answer::Recall(session, want)) => {
                let requester = Requester {
                    client: id,
                    request: number,
                    want,
                };
                self.input(Input::Recall(session, requester));
                return;
            }
            Ok(Answer::AfterCloses(awaited)) => return self.await_close((id, number), awaited),
            Ok(Answer::Call(call)) => return self.calls.begin(Some((id, number)), call),
            Ok(Answer::Channel(program, charge)) => {
                let Some(uid) = self.clients.get(&id).map(|c| c.credentials.uid) else {
                    return;
                };
                let pending_hello = PendingHello {
                    client: id,
                    request: number,
                    uid,
                    program,
                    charge,
                };
                self.await_spare(pending_hello);
                return;
            }
            Err(errno) => return self.refuse(id, number, errno),
        };
        self.reply(id, number, body, fds);
    }

    pub(crate) fn refuse(&mut self, id: ClientId, number: u32, errno: Errno) {
        self.control.counters.refused += 1;
        self.reply(id, number, ReplyBody::Error { errno: errno.0 }, Vec::new());
    }

    pub(crate) fn reply(
        &mut self,
        client: ClientId,
        request: u32,
        body: ReplyBody,
        fds: Vec<OwnedFd>,
    ) {
        // The rows that sessions have left are rewritten before the reply reports it.
        self.tell_of_left();
        if request != NO_REPLY {
            let may_be_last = matches!(body, ReplyBody::UseKernel { .. });
            let reply = PendingReply {
                message: encode(&Reply { id: request, body }),
                fds,
                may_be_last,
            };
            self.send(client, reply);
        }
    }

    fn send_list(&mut self, request: RequestId, bytes: Vec<u8>, body: fn(ListPart) -> ReplyBody) {
        let Some(client) = self.clients.get(&request.0) else {
            return;
        };
        let uid = client.credentials.uid;
        match self.lists.charge(uid, bytes.len() as u64) {
            Ok(charge) => self.send_charged_list(request, (bytes, charge), body),
            Err(_) => self.refuse_list(request),
        }
    }

    /// Sends what fits; the rest follows as it is read.
    pub(crate) fn send_charged_list(
        &mut self,
        (id, request): RequestId,
        (bytes, charge): (Vec<u8>, Charge),
        body: fn(ListPart) -> ReplyBody,
    ) {
        self.tell_of_left();
        if request == NO_REPLY {
            return;
        }
        if let Some(client) = self.clients.get_mut(&id) {
            client.lists.push_back(OutgoingList {
                request,
                bytes,
                sent: 0,
                body,
                _charge: charge,
            });
            self.send_waiting(id);
        }
    }

    pub(crate) fn refuse_list(&mut self, (id, request): RequestId) {
        self.control.counters.lists_refused += 1;
        self.refuse(id, request, Errno::AGAIN);
    }

    fn perform(
        &mut self,
        id: ClientId,
        number: u32,
        body: RequestBody,
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        if is_list(&body) && self.has_unread_answer(id) {
            self.control.counters.lists_refused += 1;
            return Err(Errno::AGAIN);
        }
        if let Some(session) = self.inheritance.ends.shown_by(&body, &fds) {
            return self.await_adoption((id, number), session, (body, fds));
        }
        if let Some(port) = self.closing_port_of(id, &body) {
            return Ok(Answer::AfterCloses(AwaitedClose::Port(port, body, fds)));
        }
        self.perform_now(id, number, body, fds)
    }

    /// Whatever is being closed.
    pub(crate) fn perform_now(
        &mut self,
        id: ClientId,
        number: u32,
        body: RequestBody,
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        match body {
            RequestBody::Hello { version, program } => {
                self.hello(id, (version, program), fds.first())
            }
            RequestBody::ShowRight => self.keep_right(id, fds),
            RequestBody::Relay { session, reader } => self.relay(id, session, reader, &fds),
            RequestBody::Share {
                session,
                is_v6,
                unread,
            } => self.share(id, (session, is_v6), unread, fds),
            RequestBody::Probe => self.probe(id, fds.first()),
            RequestBody::ListSessions => {
                self.begin_listing((id, number));
                Ok(Answer::Silence)
            }
            RequestBody::ListRawFlows => Ok(self.list_raw_flows()),
            RequestBody::ReadCounters => Ok(self.read_counters()),
            RequestBody::ReadStatus => Ok(self.read_status()),
            RequestBody::Capture(request) => self.begin_capture(id, number, request),
            RequestBody::Reload { text } => self.reload_text(id, (text, fds)),
            RequestBody::Qos(request) => self.qos_when_asked(id, request),
            RequestBody::Extension(request) => Ok(self.extension((id, number), request, fds)),
            RequestBody::Direct { session } => self.map_directly(id, number, session),
            body => {
                let channel = self.clients.get(&id).and_then(|client| client.channel);
                self.perform_for(channel.ok_or(Errno::PERM)?, body, fds)
            }
        }
    }

    /// Each list takes server memory until it is read.
    fn has_unread_answer(&self, id: ClientId) -> bool {
        if self.listings.has(id) {
            return true;
        }
        // While parts of a list are left, one of them waits.
        let client = self.clients.get(&id);
        client.is_some_and(|client| !client.waiting.is_empty() || client.connection.has_unread())
    }

    /// `ShowRight`: the reply comes when the socket has said where it is bound. To ask it waits for its lock, and whoever
    /// sends by it from memory of a file system of his own holds that for as long as he likes.
    fn keep_right(&mut self, id: ClientId, mut fds: Vec<OwnedFd>) -> Result<Answer, Errno> {
        let client = self.clients.get_mut(&id).ok_or(Errno::BADF)?;
        client.right = PortRight::Nothing;
        let uid = client.credentials.uid;
        self.calls.check(uid, WaitsFor::Socket)?;
        // The other end of the connection itself would keep it.
        let Some(socket) = fds.pop().filter(|right| port_right::could_be(right)) else {
            return Ok(ReplyBody::Done.into());
        };
        client.right = PortRight::Asking;
        // The thread's is to be the last close, so that the port is free.
        self.sink.drop_copies_of(&socket);
        let make = move || {
            let shown = port_right::shown_by(&socket).ok().flatten();
            drop(socket);
            let right = shown.map_or(PortRight::Nothing, PortRight::To);
            let sequel = move |server: &mut Server| {
                let client = server.clients.get_mut(&id).ok_or(Errno::BADF)?;
                client.right = right;
                Ok(ReplyBody::Done.into())
            };
            Box::new(sequel) as Sequel
        };
        Ok(Answer::Call(Call {
            uid,
            waits_for: WaitsFor::Socket,
            make: Box::new(make),
        }))
    }

    fn perform_for(
        &mut self,
        channel: ChannelId,
        body: RequestBody,
        mut fds: Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        if takes_descriptors(&body) {
            self.check_descriptors()?;
        }
        match body {
            RequestBody::Bind {
                session,
                protocol,
                local,
                reuse,
                v6_only,
                slot,
            } => {
                let request = BindRequest {
                    protocol,
                    local,
                    reuse,
                    v6_only,
                };
                self.knowing_policy(channel, move |server| {
                    server.bind(channel, session, request, slot, &mut fds)
                })
            }
            RequestBody::Connect {
                session,
                protocol,
                remote,
                slot,
                options,
                early,
            } => {
                let target = Target {
                    protocol,
                    remote,
                    slot,
                    options,
                    early,
                };
                self.knowing_policy(channel, move |server| {
                    server.connect(channel, session, target, &mut fds)
                })
            }
            RequestBody::Listen {
                session,
                backlog,
                options,
                options_blob,
                slot,
            } => {
                let request = Listening {
                    backlog,
                    options,
                    options_blob,
                    slot,
                };
                self.listen(channel, session, request, &mut fds)
            }
            RequestBody::PortToken { session } => self.hand_out_port_token(channel, session),
            RequestBody::ReplaceDescriptor { session } => {
                self.replace_descriptor(channel, session, &mut fds)
            }
            RequestBody::StopListening { session } => {
                self.stop_listening(channel, session, &mut fds)
            }
            RequestBody::Register {
                port,
                local,
                remote,
                slot,
            } => {
                let claimed = Claimed {
                    local,
                    remote,
                    slot,
                };
                self.claim(channel, port, claimed, &mut fds)
            }
            RequestBody::Adopt {
                session,
                local,
                remote,
                slot,
                evidence,
                reuse,
                v6_only,
                delivery,
                priority,
            } => {
                let adopted = Adopted {
                    id: session,
                    flow: FlowKey {
                        protocol: Protocol::Tcp,
                        local: canonical(local),
                        remote: canonical(remote),
                    },
                    slot,
                    evidence,
                    reuse,
                    v6_only,
                    options: HandshakeOptions {
                        delivery: Some(delivery),
                        priority,
                        ..HandshakeOptions::default()
                    },
                };
                self.adopt(channel, adopted, &mut fds)
            }
            RequestBody::ReturnPending { listener, capsule } => {
                self.surrender(channel, listener, (capsule, fds.pop()))
            }
            RequestBody::ReturnClosed { port, capsule } => {
                self.finish_unregistered(channel, port, (capsule, fds.pop()))
            }
            RequestBody::LeasePorts { local, slot, most } => {
                self.lease_ports((channel, slot), local, most)
            }
            RequestBody::ReturnPorts { ports } => Ok(self.end_leases(channel, ports)),
            RequestBody::Flooded { listener, queue } => self.flooded(channel, listener, queue),
            RequestBody::ExemptFlows { listener, flows } => self.spare(channel, listener, &flows),
            RequestBody::TakePart { listener, offer } => self.take_part(channel, listener, offer),
            RequestBody::EndDelegation { listener } => self.end_delegation(channel, listener),
            RequestBody::Cache { session, slot } => self.cache(channel, session, slot, fds.pop()),
            RequestBody::Accepted { session } => Ok(self.leave_accepted(channel, session)),
            RequestBody::FetchRecalls => Ok(self.take_recalls(channel)),
            RequestBody::FetchCaptures => Ok(self.fetch_captures(channel)),
            RequestBody::TxQueues => Ok(self.tx_queues(channel)),
            RequestBody::TxQueueEntered { number } => {
                self.tx_queue_entered(channel, number);
                Ok(Answer::Silence)
            }
            RequestBody::TxQueueClosed { number } => {
                self.tx_queue_closed(channel, number);
                Ok(Answer::Silence)
            }
            RequestBody::BeginFlush { session } => self.depart(channel, session),
            RequestBody::AbortFlush { session } => Ok(self.stay(channel, session)),
            RequestBody::Flush {
                session,
                capsule,
                then,
                options_blob,
            } => self.flush(channel, session, (capsule, fds), then, options_blob),
            RequestBody::Release { session } => self.release(channel, session),
            RequestBody::Disconnect { session, slot } => {
                self.disconnect_udp(channel, session, slot)
            }
            RequestBody::KernelSocket { session, is_v6 } => {
                self.hand_out_kernel_socket(channel, session, is_v6)
            }
            RequestBody::Unread { session, unread } => {
                self.take_unread(channel, session, unread, fds.pop());
                Ok(Answer::Silence)
            }
            RequestBody::Group { session, change } => self.change_group(channel, session, change),
            RequestBody::Resolve { interface, address } => {
                self.resolve_for(channel, NextHop { interface, address });
                Ok(Answer::Silence)
            }
            RequestBody::MisdeliveredFrame { frame } => {
                self.stray(channel, &frame);
                Ok(Answer::Silence)
            }
            RequestBody::ClaimProtocol { guard, slot } => self.claim_protocol(channel, guard, slot),
            RequestBody::UnclaimProtocol { guard, slot } => {
                self.unclaim_protocol(channel, guard, slot);
                Ok(Answer::Silence)
            }
            RequestBody::RefuseRing { session } => {
                self.take_back_ring(channel, session);
                Ok(Answer::Silence)
            }
            RequestBody::Describe {
                session,
                options_blob,
            } => {
                self.control
                    .registry
                    .admit(channel, Command::Bind, session)?;
                self.control.registry.describe(session, options_blob);
                Ok(ReplyBody::Done.into())
            }
            RequestBody::Prioritize { session, priority } => {
                self.prioritize(channel, session, priority);
                Ok(ReplyBody::Done.into())
            }
            RequestBody::PeerNotifier { session, number } => {
                self.notifier_of_peer(channel, (session, number))
            }
            RequestBody::Hello { .. }
            | RequestBody::ShowRight
            | RequestBody::Relay { .. }
            | RequestBody::Share { .. }
            | RequestBody::Probe
            | RequestBody::ListSessions
            | RequestBody::ListRawFlows
            | RequestBody::ReadCounters
            | RequestBody::ReadStatus
            | RequestBody::Capture(_)
            | RequestBody::Reload { .. }
            | RequestBody::Direct { .. }
            | RequestBody::Qos(_)
            | RequestBody::Extension(_) => Err(Errno::INVAL),
        }
    }

    fn send(&mut self, id: ClientId, reply: PendingReply) {
        let Some(client) = self.clients.get_mut(&id) else {
            return reply.fds.into_iter().for_each(|fd| self.sink.close(fd));
        };
        if client.waiting.len() >= WAITING_MAX {
            self.control.counters.deaf += 1;
            self.throw_out(id, "replies are not read");
            return;
        }
        client.waiting.push_back(reply);
        self.send_waiting(id);
    }

    fn send_waiting(&mut self, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        for _ in 0..SENT_AT_ONCE {
            client.continue_list();
            let Some(PendingReply { message, fds, .. }) = client.waiting.front() else {
                break;
            };
            let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            match client.connection.send(message, &borrowed) {
                Ok(()) => {
                    let sent = client.waiting.pop_front();
                    // Of what is sent at once the session has the same socket.
                    let last = sent.filter(|reply| reply.may_be_last);
                    self.sink.drop_replies(client.credentials.uid, last);
                }
                Err(SendError::Blocked) => break,
                // Its hang-up will be reported.
                Err(_) => {
                    client.lists.clear();
                    let lost = client.waiting.drain(..);
                    self.sink.drop_replies(client.credentials.uid, lost);
                    break;
                }
            }
        }
        client.continue_list();
        for late in &mut client.waiting {
            late.may_be_last = true;
        }
        self.watch_client(id);
    }

    /// Disconnects a client that violates the protocol.
    fn throw_out(&mut self, id: ClientId, why: &str) {
        if let Some(client) = self.clients.get(&id) {
            info!(pid = client.credentials.pid, why, "client disconnected");
            self.control.counters.malformed += 1;
        }
        self.disconnect(id);
    }

    /// Handles the end of a connection, and thereby of its process.
    pub(crate) fn disconnect(&mut self, id: ClientId) {
        let Some(client) = self.clients.remove(&id) else {
            return;
        };
        self.sink
            .drop_replies(client.credentials.uid, client.waiting);
        self.poll.remove(&client.connection, client.token);
        self.give_back_memory_later();
        let uid = client.credentials.uid;
        self.sink.close_connection(uid, client.connection);
        if client.is_registering {
            self.channel_pool.forget_pending_hello(id);
        }
        self.inheritance.give_back(client.inherits);
        for fd in self.inheritance.ends.forget_client(id) {
            self.sink.close_of(uid, fd);
        }
        self.end_capture(id);
        if let Some(channel) = client.channel {
            self.channel_gone(channel);
        }
    }

    /// Returns the control connection of the process that owns `channel`.
    pub(crate) fn client_of(&self, channel: ChannelId) -> Option<ClientId> {
        self.channels.get(&channel).map(|channel| channel.client)
    }
}

/// Returns whether the size of the answer is under the client's control.
fn is_list(body: &RequestBody) -> bool {
    matches!(
        body,
        RequestBody::ListSessions
            | RequestBody::ListRawFlows
            | RequestBody::ReadCounters
            | RequestBody::Qos(QosRequest::Show)
            | RequestBody::Extension(ExtensionRequest::List)
    )
}

/// Returns whether the request opens a session, which takes descriptors in the server.
fn takes_descriptors(body: &RequestBody) -> bool {
    match body {
        RequestBody::Bind { session, .. } | RequestBody::Connect { session, .. } => {
            matches!(session, SessionRef::New | SessionRef::Again(_))
        }
        RequestBody::Listen { .. }
        | RequestBody::Adopt { .. }
        | RequestBody::PortToken { .. }
        | RequestBody::Register { .. } => true,
        _ => false,
    }
}
