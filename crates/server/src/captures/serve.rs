//! What captures do in the server.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use portolan_control::{ClientId, Errno};
use portolan_proto::capture::{CaptureNews, CaptureRequest, CaptureRing, CapturedEnd, PIECE_MAX};
use portolan_proto::control::ReplyBody;
use portolan_proto::local::Side;
use portolan_sys::shm;
use portolan_types::{ChannelId, SessionId};
use rustix::io::fcntl_dupfd_cloexec;
use tracing::debug;

use super::{Capture, ClosedEnd, ProcessCapture, ProcessCaptures};
use crate::requests::Answer;
use crate::server::Server;

/// Captures of one user. A process is recorded in at most those of its user and root's.
const PER_USER: usize = 2;

/// Ends in one message.
const ENDS_AT_ONCE: usize = 256;

impl Server {
    /// `Capture`: begins one that lasts as long as the connection.
    pub(crate) fn begin_capture(
        &mut self,
        client: ClientId,
        number: u32,
        request: CaptureRequest,
    ) -> Result<Answer, Errno> {
        let uid = self
            .clients
            .get(&client)
            .ok_or(Errno::BADF)?
            .credentials
            .uid;
        let captures = &self.captures.by_client;
        if captures.contains_key(&client) {
            return Err(Errno::ALREADY);
        }
        if captures.values().filter(|its| its.uid == uid).count() >= PER_USER {
            return Err(Errno::BUSY);
        }
        self.check_descriptors()?;
        let capture = Capture {
            number,
            uid,
            request,
            pairs: HashSet::new(),
        };
        self.captures.by_client.insert(client, capture);
        debug!(uid, "capture begun");
        let channels: Vec<ChannelId> = self.channels.keys().copied().collect();
        for channel in channels {
            self.capture_process(channel, client);
        }
        self.tell_capture(client, CaptureNews::Ready, Vec::new());
        Ok(Answer::Silence)
    }

    /// Has a new process record from its first byte on, if there are captures of it.
    pub(crate) fn capture_newcomer(&mut self, channel: ChannelId) {
        let clients: Vec<ClientId> = self.captures.by_client.keys().copied().collect();
        for client in clients {
            self.capture_process(channel, client);
        }
    }

    /// Has a process record for a capture, if that includes it.
    fn capture_process(&mut self, channel: ChannelId, client: ClientId) {
        let Some(capture) = self.captures.by_client.get(&client) else {
            return;
        };
        let Some(process) = self.control.registry.process(channel) else {
            return;
        };
        if !capture.includes(process) {
            return;
        }
        let news = CaptureNews::Process {
            channel,
            pid: process.pid,
            program: process.program.clone(),
        };
        let request = capture.request;
        let Some(record) = self.channels.get_mut(&channel) else {
            return;
        };
        let Ok(memory) = shm::create_capture(request.ring_size) else {
            return;
        };
        let Ok(copy) = fcntl_dupfd_cloexec(&memory, 0) else {
            return;
        };
        self.captures.rings += 1;
        record.captures.list.push(ProcessCapture {
            client,
            ring: CaptureRing {
                number: self.captures.rings,
                is_new: true,
                snap: request.snap.min(PIECE_MAX),
                subject: request.subject,
            },
            memory: Some(memory),
        });
        record.captures.has_news = true;
        record.recall_event.wake();
        self.tell_capture(client, news, vec![copy]);
        let held = self.control.registry.held_by(channel);
        let ends: Vec<CapturedEnd> = held
            .into_iter()
            .filter_map(|id| self.captured_end(id, channel))
            .collect();
        for some in ends.chunks(ENDS_AT_ONCE) {
            self.tell_of_ends(client, some.to_vec());
        }
    }

    /// `FetchCaptures`: returns the rings in which the process is to record.
    pub(crate) fn fetch_captures(&mut self, channel: ChannelId) -> Answer {
        match self.channels.get_mut(&channel) {
            Some(record) => {
                let (rings, memory) = record.captures.fetch();
                Answer::Reply(ReplyBody::Captures(rings), memory)
            }
            None => Answer::Silence,
        }
    }

    /// Called before a process gets an end of a local session, so that its capture knows the first record's.
    pub(crate) fn announce_end(&mut self, id: SessionId, channel: ChannelId) {
        if self.captures.by_client.is_empty() {
            return;
        }
        let Some(record) = self.channels.get(&channel) else {
            return;
        };
        let list = &record.captures.list;
        let clients: Vec<ClientId> = list.iter().map(|capture| capture.client).collect();
        if let Some(end) = self.captured_end(id, channel) {
            for client in clients {
                self.tell_of_ends(client, vec![end.clone()]);
            }
        }
    }

    fn captured_end(&self, id: SessionId, channel: ChannelId) -> Option<CapturedEnd> {
        let end = self.handles.local(id)?;
        let session = self.control.registry.session(id)?;
        let remote = session.remote?;
        let (opener, accepter) = match end.side {
            Side::Opener => (session.local, remote),
            Side::Accepter => (remote, session.local),
        };
        Some(CapturedEnd {
            channel,
            session: id,
            pair: end.memory.number,
            side: end.side,
            opener,
            accepter,
            from_opener: end.memory.taken_by(Side::Accepter),
            from_accepter: end.memory.taken_by(Side::Opener),
            at: self.now.as_nanos(),
        })
    }

    fn tell_of_ends(&mut self, client: ClientId, ends: Vec<CapturedEnd>) {
        if let Some(capture) = self.captures.by_client.get_mut(&client) {
            capture.pairs.extend(ends.iter().map(|end| end.pair));
            self.tell_capture(client, CaptureNews::Ends(ends), Vec::new());
        }
    }

    /// Called when an end was closed or reset.
    pub(crate) fn tell_of_closed_end(&mut self, (pair, side): (u64, Side), how: ClosedEnd) {
        let mut told = Vec::new();
        for (client, capture) in &mut self.captures.by_client {
            if capture.pairs.contains(&pair) {
                told.push(*client);
            }
            if how.is_last {
                capture.pairs.remove(&pair);
            }
        }
        for client in told {
            let is_reset = how.is_reset;
            let news = CaptureNews::Closed {
                pair,
                side,
                is_reset,
            };
            self.tell_capture(client, news, Vec::new());
        }
    }

    /// Called when a process and its channel are gone.
    pub(crate) fn tell_of_gone_process(&mut self, channel: ChannelId, captures: ProcessCaptures) {
        for capture in captures.list {
            let news = CaptureNews::ProcessGone(channel);
            self.tell_capture(capture.client, news, Vec::new());
        }
    }

    fn tell_capture(&mut self, client: ClientId, news: CaptureNews, fds: Vec<OwnedFd>) {
        if let Some(capture) = self.captures.by_client.get(&client) {
            self.reply(client, capture.number, ReplyBody::Capture(news), fds);
        }
    }

    /// Called when a connection has ended.
    pub(crate) fn end_capture(&mut self, client: ClientId) {
        if self.captures.by_client.remove(&client).is_none() {
            return;
        }
        for record in self.channels.values_mut() {
            let before = record.captures.list.len();
            let list = &mut record.captures.list;
            list.retain(|capture| capture.client != client);
            if list.len() != before {
                record.captures.has_news = true;
                record.recall_event.wake();
            }
        }
    }
}
