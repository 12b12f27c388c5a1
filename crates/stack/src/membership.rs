//! Group memberships of a UDP socket, with source filters (RFC 3376 §3, RFC 3810 §4): what remains to be
//! checked after the kernel has joined the group and the filter has delivered a copy.

use core::net::IpAddr;

/// The memberships of one socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memberships {
    joined: Vec<Membership>,
    /// Also receives from groups that other sockets on the host have joined (`IP_MULTICAST_ALL`).
    pub all: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Membership {
    group: IpAddr,
    interface: u32,
    sources: Sources,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Sources {
    Only(Vec<IpAddr>),
    AllBut(Vec<IpAddr>),
}

impl Default for Memberships {
    fn default() -> Memberships {
        Memberships {
            joined: Vec::new(),
            all: true,
        }
    }
}

impl Memberships {
    /// Whether the socket accepts a datagram to `group` that arrived on that device from `source`.
    pub fn accept(&self, group: IpAddr, interface: u32, source: IpAddr) -> bool {
        match self.find(group, interface) {
            Some(at) => match &self.joined[at].sources {
                Sources::Only(sources) => sources.contains(&source),
                Sources::AllBut(sources) => !sources.contains(&source),
            },
            None => self.all,
        }
    }

    /// The joins that establish these memberships on a fresh socket: group, device, and a source, or none for all.
    pub fn joins(&self) -> Vec<(IpAddr, u32, Option<IpAddr>)> {
        let mut joins = Vec::new();
        for Membership {
            group,
            interface,
            sources,
        } in &self.joined
        {
            match sources {
                Sources::Only(sources) => {
                    joins.extend(sources.iter().map(|it| (*group, *interface, Some(*it))));
                }
                Sources::AllBut(_) => joins.push((*group, *interface, None)),
            }
        }
        joins
    }

    pub fn join(&mut self, group: IpAddr, interface: u32) {
        if self.find(group, interface).is_none() {
            self.joined.push(Membership {
                group,
                interface,
                sources: Sources::AllBut(Vec::new()),
            });
        }
    }

    pub fn leave(&mut self, group: IpAddr, interface: u32) {
        self.joined
            .retain(|m| !(m.group == group && m.interface == interface));
    }

    pub fn allow(&mut self, group: IpAddr, interface: u32, source: IpAddr) {
        match self.find(group, interface) {
            Some(at) => match &mut self.joined[at].sources {
                Sources::Only(sources) if !sources.contains(&source) => sources.push(source),
                Sources::Only(_) => {}
                Sources::AllBut(sources) => sources.retain(|other| *other != source),
            },
            None => self.joined.push(Membership {
                group,
                interface,
                sources: Sources::Only(vec![source]),
            }),
        }
    }

    /// Returns true if the membership ended with its last source.
    pub fn disallow(&mut self, group: IpAddr, interface: u32, source: IpAddr) -> bool {
        let Some(at) = self.find(group, interface) else {
            return false;
        };
        match &mut self.joined[at].sources {
            Sources::Only(sources) => {
                sources.retain(|other| *other != source);
                if sources.is_empty() {
                    self.joined.remove(at);
                    return true;
                }
            }
            Sources::AllBut(sources) if !sources.contains(&source) => sources.push(source),
            Sources::AllBut(_) => {}
        }
        false
    }

    fn find(&self, group: IpAddr, interface: u32) -> Option<usize> {
        self.joined
            .iter()
            .position(|m| m.group == group && m.interface == interface)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IF: u32 = 3;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn heard(memberships: &Memberships, source: &str) -> bool {
        memberships.accept(ip("239.1.1.1"), IF, ip(source))
    }

    #[test]
    fn a_group_is_heard_on_the_device_it_was_joined_on() {
        let mut memberships = Memberships {
            all: false,
            ..Memberships::default()
        };
        assert!(!heard(&memberships, "10.0.0.1"));
        memberships.join(ip("239.1.1.1"), IF);
        assert!(heard(&memberships, "10.0.0.1"));
        assert!(!memberships.accept(ip("239.1.1.1"), IF + 1, ip("10.0.0.1")));
        assert!(!memberships.accept(ip("239.1.1.2"), IF, ip("10.0.0.1")));
        memberships.leave(ip("239.1.1.1"), IF);
        assert!(!heard(&memberships, "10.0.0.1"));
    }

    #[test]
    fn what_others_joined_is_heard_unless_the_socket_says_otherwise() {
        assert!(heard(&Memberships::default(), "10.0.0.1"));
    }

    #[test]
    fn sources_are_allowed_one_by_one_and_the_last_takes_the_membership_along() {
        let mut memberships = Memberships {
            all: false,
            ..Memberships::default()
        };
        for source in ["10.0.0.1", "10.0.0.2"] {
            memberships.allow(ip("239.1.1.1"), IF, ip(source));
        }
        assert!(heard(&memberships, "10.0.0.2") && !heard(&memberships, "10.0.0.3"));
        assert!(!memberships.disallow(ip("239.1.1.1"), IF, ip("10.0.0.1")));
        assert!(!heard(&memberships, "10.0.0.1"));
        assert!(memberships.disallow(ip("239.1.1.1"), IF, ip("10.0.0.2")));
    }

    #[test]
    fn blocked_sources_are_not_heard_until_they_are_unblocked() {
        let mut memberships = Memberships::default();
        memberships.join(ip("239.1.1.1"), IF);
        memberships.disallow(ip("239.1.1.1"), IF, ip("10.0.0.1"));
        assert!(!heard(&memberships, "10.0.0.1") && heard(&memberships, "10.0.0.2"));
        memberships.allow(ip("239.1.1.1"), IF, ip("10.0.0.1"));
        assert!(heard(&memberships, "10.0.0.1"));
    }
}
