//! Requests for groups.

use portolan_control::qos::transmit::{ClassId, ClassRates, Link as Ledger};
use portolan_proto::qos::{
    Algorithm, GroupAction, GroupOptions, GroupReport, QosReply, QosReport, Scope,
};
use portolan_sys::traffic;
use portolan_sys::unix::Credentials;
use rustix::event::epoll::EventFlags;

use super::super::transmit::{ClassEntry, LinkCounts, kept, open_life};
use super::{Group, Right};
use crate::qos::request::{Basis, Outcome, Requester, refusal, refuse};
use crate::server::{Server, Source};

impl Server {
    pub(crate) fn change_multiplex_group(
        &mut self,
        requester: Requester,
        key: u32,
        action: GroupAction,
    ) -> Outcome<QosReply> {
        let who = requester.credentials;
        match action {
            GroupAction::Create {
                device,
                bits,
                mode,
                options,
                algorithm: Algorithm::RateControlled,
            } => {
                self.create_group(requester, key, device.as_deref(), (bits, mode, options))?;
            }
            GroupAction::Open => drop(self.group(who, key, Right::Join)?),
            GroupAction::SetOptions(options) => {
                let rate = self.group(who, key, Right::Change)?.terms.rate;
                self.change_multiplex_terms(who, key, (rate, options))?;
            }
            GroupAction::SetRate { bits } => {
                let options = self.group(who, key, Right::Change)?.options;
                self.change_multiplex_terms(who, key, (bits, options))?;
            }
            GroupAction::Join { scope, bits } => {
                let member = self.join_multiplex(requester, key, scope, bits)?;
                return Ok(QosReply::Joined { member });
            }
            GroupAction::Leave { member } => self.leave_multiplex(requester, key, member)?,
            GroupAction::Delete => {
                self.group(who, key, Right::Change)?;
                self.delete_group(key);
            }
        }
        Ok(QosReply::Done)
    }

    pub(crate) fn may_look_at_group(&self, who: Credentials, key: u32) -> bool {
        self.group(who, key, Right::Look).is_ok()
    }

    fn group(&self, who: Credentials, key: u32, right: Right) -> Outcome<&Group> {
        match self.qos.groups.by_key.get(&key) {
            None => refuse(libc::ENOENT, format!("there is no group {key}")),
            Some(group) if group.allows(who, right) => Ok(group),
            Some(group) => {
                let what = match right {
                    Right::Look => "look at",
                    Right::Change => "change",
                    Right::Join => "join",
                };
                let mode = group.mode;
                refuse(
                    libc::EACCES,
                    format!("its mode {mode:o} does not let you {what} group {key}"),
                )
            }
        }
    }

    fn create_group(
        &mut self,
        requester: Requester,
        key: u32,
        device: Option<&str>,
        (bits, mode, options): (u64, u16, GroupOptions),
    ) -> Outcome {
        if self.qos.groups.by_key.contains_key(&key) {
            return refuse(libc::EEXIST, format!("there is a group {key} already"));
        }
        if mode & !0o777 != 0 {
            return refuse(
                libc::EINVAL,
                format!("a mode of {mode:o} has more than permission bits"),
            );
        }
        let owner = requester.credentials;
        let maker = match (
            open_life(&Scope::Process { pid: owner.pid }),
            requester.basis,
        ) {
            (maker, Basis::Request | Basis::Policy) => maker?,
            // It may have ended since.
            (maker, Basis::Record { .. }) => maker.ok().flatten(),
        };
        let ifindex = self.link_for(device)?;
        let class = self.free_class(requester)?;
        let terms = group_terms(self.ledger(ifindex)?, bits, options)?;
        let mut ledger = self.ledger(ifindex)?.clone();
        requester.reserve(&mut ledger, class, terms.rate)?;
        let kept = ledger.kept(terms);
        self.realise(ifindex, ledger, (class, traffic::WHOLE), &kept)?;
        let maker = maker.and_then(|fd| {
            let token = self
                .poll
                .add(&fd, Source::Maker(key), EventFlags::IN)
                .ok()?;
            Some((fd, token))
        });
        let group = Group {
            class,
            ifindex,
            owner,
            mode,
            terms,
            kept,
            options,
            maker,
        };
        self.qos.groups.by_key.insert(key, group);
        self.watch_links();
        Ok(())
    }

    /// Changes the rate, which is admitted like a new one, or the options; its flows' ceilings follow.
    fn change_multiplex_terms(
        &mut self,
        who: Credentials,
        key: u32,
        (bits, options): (u64, GroupOptions),
    ) -> Outcome {
        let group = self.group(who, key, Right::Change)?;
        let (id, ifindex, owner) = (group.class, group.ifindex, group.owner.uid);
        let mut ledger = self.ledger(ifindex)?.clone();
        let terms = group_terms(&ledger, bits, options)?;
        if terms.rate != group.terms.rate {
            ledger.reserve(id, owner, terms.rate).map_err(refusal)?;
        }
        let kept = ledger.kept(terms);
        self.realise(ifindex, ledger.clone(), (id, traffic::WHOLE), &kept)?;
        if let Some(group) = self.qos.groups.by_key.get_mut(&key) {
            (group.options, group.terms, group.kept) = (options, terms, kept);
        }
        let group = self.group(who, key, Right::Change)?;
        let members = self.qos.transmit.members(key).into_iter();
        let changes: Vec<(ClassId, ClassRates)> = members
            .map(|(member, rate)| Ok((member, group.member_terms(&ledger, rate)?)))
            .collect::<Outcome<_>>()?;
        for (member, terms) in changes {
            self.qos.transmit.set_terms(member, terms);
        }
        self.settle_link(ifindex);
        self.look_at_group(key);
        Ok(())
    }

    fn join_multiplex(
        &mut self,
        requester: Requester,
        key: u32,
        scope: Scope,
        bits: u64,
    ) -> Outcome<u32> {
        let life = open_life(&scope)?;
        self.may_decide(requester, &scope)?;
        let group = self.group(requester.credentials, key, Right::Join)?;
        if !matches!(scope, Scope::Flow(_) | Scope::Process { .. }) {
            return refuse(
                libc::EINVAL,
                "flows and processes join groups, nothing else",
            );
        }
        if self.qos.transmit.has(&scope) {
            let text = format!("{scope} has a rate already: end that first");
            return refuse(libc::EBUSY, text);
        }
        let ifindex = group.ifindex;
        let terms = group.member_terms(self.ledger(ifindex)?, bits)?;
        let within = (key, group.class);
        let id = self.free_class(requester)?;
        let uid = requester.credentials.uid;
        let mut ledger = self.ledger(ifindex)?.clone();
        ledger
            .join(within.1, id, uid, terms.rate)
            .map_err(refusal)?;
        let held = ClassEntry {
            group: Some(within),
            ..ClassEntry::new(scope, ifindex, uid, terms)
        };
        self.install(id, held, ledger, life)?;
        Ok(u32::from(id.0))
    }

    fn leave_multiplex(&mut self, requester: Requester, key: u32, member: u32) -> Outcome {
        let who = requester.credentials;
        let id = u16::try_from(member).ok().map(ClassId);
        let known = id.and_then(|id| Some((id, self.qos.transmit.member_of(id, key)?)));
        let Some((id, uid)) = known else {
            return refuse(libc::ENOENT, format!("group {key} has no member {member}"));
        };
        if who.uid != uid {
            self.group(who, key, Right::Change)?;
        }
        self.drop_class(id);
        Ok(())
    }

    /// Handles the end of the process that made the group.
    pub(crate) fn on_maker_gone(&mut self, key: u32) {
        if let Some(group) = self.qos.groups.by_key.get_mut(&key)
            && let Some((fd, token)) = group.maker.take()
        {
            self.poll.remove(&fd, token);
        }
        self.look_at_group(key);
    }

    /// Ends a group without maker and members, unless it is to be kept.
    pub(in crate::qos) fn look_at_group(&mut self, key: u32) {
        let Some(group) = self.qos.groups.by_key.get(&key) else {
            return;
        };
        let is_used = group.maker.is_some() || !self.qos.transmit.members(key).is_empty();
        if !is_used && !group.options.keep {
            self.delete_group(key);
        }
    }

    fn delete_group(&mut self, key: u32) {
        let Some(group) = self.qos.groups.by_key.remove(&key) else {
            return;
        };
        if let Some((fd, token)) = group.maker {
            self.poll.remove(&fd, token);
        }
        for (member, _) in self.qos.transmit.members(key) {
            self.drop_class(member);
        }
        self.release_rate(group.ifindex, group.class);
    }

    pub(in crate::qos) fn report_groups(&self, counts: &LinkCounts, report: &mut QosReport) {
        for (&key, group) in &self.qos.groups.by_key {
            let Ok(ledger) = self.ledger(group.ifindex) else {
                continue;
            };
            report.groups.push(GroupReport {
                key,
                device: self.qos.transmit.device(group.ifindex),
                class: group.class.0,
                uid: group.owner.uid,
                mode: group.mode,
                rate: group.terms.rate,
                reserved: ledger.reserved_in(group.class),
                options: group.options,
                kept: kept(
                    self.qos.transmit.link(group.ifindex),
                    &group.terms,
                    &group.kept,
                ),
                traffic: counts.of(group.ifindex, group.class.0),
            });
        }
    }
}

fn group_terms(link: &Ledger, bits: u64, options: GroupOptions) -> Outcome<ClassRates> {
    let ceiling = if options.slack { link.rate() } else { bits };
    link.plain_terms(bits, ceiling.max(bits)).map_err(refusal)
}
