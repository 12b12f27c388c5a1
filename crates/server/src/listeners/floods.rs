//! SYN floods (ADR 22), as seen by the packet filter and by the performers of handshakes.

use std::time::Duration;

use portolan_control::{Answering, Command, Effects, Errno};
use portolan_proto::control::AcceptQueue;
use portolan_proto::filter::{BindingKey, Flood};
use portolan_proto::report::{CookieCounts, ListenerReport};
use portolan_stack::passive::{COOKIE_LIFETIME, SOMAXCONN};
use portolan_types::{ChannelId, FlowKey, SessionId};
use tracing::{debug, warn};

use crate::requests::Answer;
use crate::server::Server;

/// The capacity of both queues of a listener, and as many connections that have left them.
const SPARED_MAX: usize = 4 * SOMAXCONN as usize;

/// The filter is told no more often.
const COOKIES_NOTED_FOR: Duration = Duration::from_secs(1);

impl Server {
    fn answering(&self) -> Answering {
        Answering {
            config: self.base_config(),
            cookies: self.sysctls.values().cookies,
        }
    }

    /// Notes a SYN to the listener that was answered by a cookie, or dropped.
    pub(crate) fn note_unkept(&mut self, id: SessionId, flow: &FlowKey) {
        self.rx_throttle.note(self.now);
        if let Some(binding) = self.control.on_unkept_syn(id, flow, self.now) {
            let (answering, mut effects) = (self.answering(), Effects::new());
            let control = &mut self.control;
            control.begin_flood(&binding, &answering, self.now, &mut effects);
            self.carry_out(effects);
        }
    }

    /// `Flooded`: a report of a delegate.
    pub(crate) fn flooded(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        queue: AcceptQueue,
    ) -> Result<Answer, Errno> {
        self.check_delegate(channel, id)?;
        let answering = self.answering();
        let effects = self
            .control
            .on_flooded((channel, id), queue, &answering, self.now);
        self.carry_out(effects);
        Ok(Answer::Silence)
    }

    /// `ExemptFlows`: a request of a delegate. Flows of other listeners are ignored.
    pub(crate) fn spare(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        flows: &[FlowKey],
    ) -> Result<Answer, Errno> {
        self.check_delegate(channel, id)?;
        for flow in flows {
            if let Ok(flow) = self.flow_of(id, flow.local, flow.remote) {
                self.spare_flow(id, flow);
            }
        }
        Ok(Answer::Silence)
    }

    fn check_delegate(&self, channel: ChannelId, id: SessionId) -> Result<(), Errno> {
        self.control.registry.admit(channel, Command::Serve, id)?;
        if self.control.is_delegate(id, channel) {
            Ok(())
        } else {
            Err(Errno::PERM)
        }
    }

    fn spare_flow(&mut self, id: SessionId, flow: FlowKey) {
        let exempt = self.control.registry.listener(id).map(|it| &it.exempt);
        let count = exempt.map_or(0, |it| it.as_ref().map_or(0, |it| it.flows.len()));
        let is_spared = count < SPARED_MAX && self.filter.floods.spare(&flow).is_ok();
        let spared = is_spared.then_some(flow);
        self.control.note_exempt(id, spared, self.now);
    }

    pub(crate) fn forget_exempt(&self, flows: &[FlowKey]) {
        for flow in flows {
            if let Err(error) = self.filter.floods.spare_no_more(flow) {
                warn!(%error, "a flow stays spared");
            }
        }
    }

    /// Cookies go out: segments that come for listeners may be their acknowledgements.
    pub(crate) fn note_cookies(&mut self) {
        self.cookie_clock.note(self.now);
        if self.cookies_noted > self.now {
            return;
        }
        self.cookies_noted = self.now + COOKIES_NOTED_FOR;
        let until = self.cookies_noted + COOKIE_LIFETIME;
        if let Err(error) = self.filter.floods.expect_cookies(until) {
            warn!(%error, "the filter drops what acknowledges cookies");
        }
    }

    pub(crate) fn answer_flood(&mut self, binding: &BindingKey, flood: &Flood) {
        self.note_cookies();
        if let Err(error) = self.filter.floods.set(binding, flood) {
            warn!(%error, "the filter does not answer a flood");
            self.end_flood(binding);
        }
    }

    pub(crate) fn end_flood(&mut self, binding: &BindingKey) {
        // Those that the filter has sent to the last.
        self.note_cookies();
        let seen = self.filter.floods.seen(binding);
        debug!(?binding, ?seen, "SYNs are no flood any more");
        self.control.on_flood_ended(binding, seen);
        if let Err(error) = self.filter.floods.end(binding) {
            warn!(%error, "the filter goes on answering a flood");
        }
    }

    /// Returns the report of a listener; none for other sessions.
    pub(crate) fn report_listener(&mut self, id: SessionId) -> Option<ListenerReport> {
        self.control.registry.listener(id)?;
        let floods = &self.filter.floods;
        let is_flooded = self.control.is_flooded(id, |binding| floods.seen(binding));
        let listener = self.control.registry.listener(id)?;
        let mut cookies = listener.opens.cookies;
        for channel in self.control.delegates_of(id) {
            cookies.add(self.claimed_cookies(id, channel));
        }
        Some(ListenerReport {
            is_delegated: listener.is_delegated(),
            is_flooded,
            filter: listener.floods,
            cookies,
        })
    }

    /// Returns the cookie counts claimed by a process that performs the listener's handshakes.
    pub(crate) fn claimed_cookies(&self, id: SessionId, channel: ChannelId) -> CookieCounts {
        let listener = self.control.registry.listener(id);
        let slot = listener.and_then(|listener| {
            let mut delegates = listener.delegates();
            Some(delegates.find(|(its, _)| *its == channel)?.1)
        });
        let row = slot.and_then(|slot| self.channels.get(&channel)?.statistics.row(slot));
        row.filter(|row| row.session == id.0)
            .map_or_else(CookieCounts::default, |row| CookieCounts::of(&row.figures))
    }

    /// Reviews the floods of a listener that has changed or been removed.
    pub(crate) fn review_floods_of(&mut self, id: SessionId) {
        if self.control.has_floods() {
            let answering = self.answering();
            let effects = self.control.review_floods_of(id, &answering);
            self.carry_out(effects);
        }
    }

    /// Ends the floods of a listener: its owner answers all further SYNs.
    pub(crate) fn end_floods_of(&mut self, id: SessionId) {
        let effects = self.control.end_floods_of(id);
        self.carry_out(effects);
    }

    /// Ends the floods that are over.
    pub(crate) fn look_at_floods(&mut self) {
        self.sysctls.refresh(self.now);
        let answering = self.answering();
        let floods = &self.filter.floods;
        let seen = |binding: &BindingKey| floods.seen(binding);
        let effects = self.control.look_at_floods(&answering, self.now, seen);
        self.carry_out(effects);
    }
}
