//! Names of socket states, as accepted and printed by ss(8).

/// States that a socket can have, one bit each, as in the kernel's `tcp_states.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct States(u16);

const NAMES: [(&str, &str, u8); 11] = [
    // The printed name, the name in a filter, the kernel's number.
    ("ESTAB", "established", 1),
    ("SYN-SENT", "syn-sent", 2),
    ("SYN-RECV", "syn-recv", 3),
    ("FIN-WAIT-1", "fin-wait-1", 4),
    ("FIN-WAIT-2", "fin-wait-2", 5),
    ("TIME-WAIT", "time-wait", 6),
    ("UNCONN", "unconnected", 7),
    ("CLOSE-WAIT", "close-wait", 8),
    ("LAST-ACK", "last-ack", 9),
    ("LISTEN", "listening", 10),
    ("CLOSING", "closing", 11),
];

const ESTABLISHED: u8 = 1;
const SYN_RECEIVED: u8 = 3;
const TIME_WAIT: u8 = 6;
const CLOSED: u8 = 7;
const LISTENING: u8 = 10;

impl States {
    pub(super) const NONE: States = States(0);
    pub(super) const ALL: States = States(0b1111_1111_1110);
    /// What ss(8) lists by default.
    pub(super) const CONNECTED: States = States::ALL
        .without(States::of(LISTENING))
        .without(States::of(CLOSED))
        .without(States::of(TIME_WAIT))
        .without(States::of(SYN_RECEIVED));
    pub(super) const LISTENING: States = States::of(LISTENING).with(States::of(CLOSED));

    const fn of(number: u8) -> States {
        States(1 << number)
    }

    pub(super) const fn with(self, other: States) -> States {
        States(self.0 | other.0)
    }

    pub(super) const fn without(self, other: States) -> States {
        States(self.0 & !other.0)
    }

    pub(super) fn has(self, other: States) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the state with this printed name. States that ss(8) has no name for count as closed.
    pub(super) fn of_socket(name: &str) -> States {
        let known = NAMES.iter().find(|(printed, ..)| *printed == name);
        States::of(known.map_or(CLOSED, |(.., number)| *number))
    }

    /// Returns the states with this name in a filter.
    pub(super) fn named(name: &str) -> Option<States> {
        let name = name.to_ascii_lowercase();
        let closed_or_fresh = States::of(SYN_RECEIVED).with(States::of(TIME_WAIT));
        Some(match name.as_str() {
            "all" => States::ALL,
            "connected" => States::ALL
                .without(States::of(LISTENING))
                .without(States::of(CLOSED)),
            "synchronized" => States::named("connected")?.without(States::of(2)),
            "bucket" => closed_or_fresh,
            "big" => States::ALL.without(closed_or_fresh),
            "estab" => States::of(ESTABLISHED),
            "close" | "closed" | "unconn" => States::of(CLOSED),
            "listen" => States::of(LISTENING),
            name => {
                let known = NAMES.iter().find(|(_, called, _)| *called == name)?;
                States::of(known.2)
            }
        })
    }
}

/// Returns the printed name of a state by the kernel's number.
pub(super) fn name_of(number: u8) -> &'static str {
    let known = NAMES.iter().find(|(.., known)| *known == number);
    known.map_or("UNKNOWN", |(printed, ..)| *printed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_printed_name_has_a_state_that_a_filter_can_name() {
        for (printed, called, number) in NAMES {
            assert_eq!(Some(States::of_socket(printed)), States::named(called));
            assert_eq!(name_of(number), printed);
        }
        assert_eq!(States::named("nosuch"), None);
    }

    #[test]
    fn without_a_word_listeners_and_the_closed_are_left_out() {
        for (name, is_listed) in [
            ("ESTAB", true),
            ("CLOSE-WAIT", true),
            ("LISTEN", false),
            ("TIME-WAIT", false),
        ] {
            assert_eq!(
                States::CONNECTED.has(States::of_socket(name)),
                is_listed,
                "{name}"
            );
        }
        assert!(States::LISTENING.has(States::of_socket("UNCONN")));
    }
}
