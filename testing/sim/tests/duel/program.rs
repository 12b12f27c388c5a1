//! The generated programs.

use bolero::TypeGenerator;
use portolan_sim::Side;
use portolan_tcp::{Config, CongestionKind, EcnMode};

/// Parameters of the two ends. Small buffers and segments make rare cases common.
#[derive(Clone, Debug, TypeGenerator)]
pub(crate) struct Setup {
    pub a: Host,
    pub b: Host,
    /// Both ends open actively.
    pub crossing: bool,
    /// Packets that arrive together are merged.
    pub gro: bool,
    /// Initial sequence number: values near the wrap are as likely as others.
    pub start: i16,
    /// The handshake is completed before the hostile part begins.
    pub established: bool,
}

#[derive(Clone, Debug, TypeGenerator)]
pub(crate) struct Host {
    mss: u8,
    send_buffer: u8,
    receive_buffer: u8,
    flags: u8,
}

impl Host {
    /// The smallest buffers and segments, with all options enabled.
    pub(crate) const fn plain() -> Host {
        Host {
            mss: 0,
            send_buffer: 1,
            receive_buffer: 0,
            flags: 0,
        }
    }

    pub(crate) fn config(&self) -> Config {
        let defaults = Config::default();
        let size = |code: u8| 600usize << (code % 8);
        let send = size(self.send_buffer);
        let receive = size(self.receive_buffer);
        Config {
            mss: [100, 536, 1460, 9000][usize::from(self.mss % 4)],
            send_buffer: send,
            send_buffer_max: send << (self.send_buffer >> 6),
            receive_buffer: receive,
            receive_buffer_max: receive << (self.receive_buffer >> 5),
            timestamps: self.flags & 1 == 0,
            sack: self.flags & 2 == 0,
            window_scaling: self.flags & 4 == 0,
            congestion: CongestionKind::ALL[usize::from(self.flags >> 3) % 3],
            ecn: match self.flags >> 6 {
                0 => EcnMode::Accept,
                1 => EcnMode::Off,
                _ => EcnMode::Request,
            },
            ..defaults
        }
    }
}

/// One of the two ends, as a type that can be generated.
#[derive(Clone, Copy, Debug, TypeGenerator)]
pub(crate) struct Who(bool);

impl Who {
    pub(crate) fn side(self) -> Side {
        if self.0 { Side::B } else { Side::A }
    }
}

impl From<Side> for Who {
    fn from(side: Side) -> Who {
        Who(side == Side::B)
    }
}

#[derive(Clone, Debug, TypeGenerator)]
pub(crate) enum Step {
    Write {
        who: Who,
        bytes: u16,
    },
    Read {
        who: Who,
        bytes: u16,
    },
    ShutdownSend(Who),
    ShutdownReceive(Who),
    Close(Who),
    Abort(Who),
    /// Delivers the packet at that place in the queue of those in flight from `who`.
    Deliver {
        who: Who,
        place: u8,
    },
    DeliverAll(Who),
    /// Delivers and reads everything, several times.
    Calm(u8),
    Drop {
        who: Who,
        place: u8,
    },
    DropAll(Who),
    Duplicate {
        who: Who,
        place: u8,
    },
    /// Marks a packet with CE instead of dropping it.
    Mark {
        who: Who,
        place: u8,
    },
    /// Advances the clock by milliseconds; timers that come due run late.
    Wait(u8),
    /// Advances the clock to the next timer of an end.
    Timer(Who),
    /// Migrates the session to another holder.
    Migrate(Who),
    Option {
        who: Who,
        kind: u8,
        value: u16,
    },
    /// A blind attacker sends a segment to `who`.
    Forge {
        who: Who,
        kind: u8,
        offset: i32,
        bytes: u8,
        flags: u8,
    },
    /// An attacker on the path changes a packet from `who`.
    Corrupt {
        who: Who,
        place: u8,
        field: u8,
        value: i16,
    },
}
