//! `<portolan/qos.h>`: converts between its structures and `errno`, and `portolan::qos`. These
//! symbols are this library's own, not libc's.

use std::ffi::c_char;

use libc::c_int;
use portolan::qos::{
    self, Adapt, Cpu, GroupOptions, Kind, Member, MultiplexGroup, Rate, Receive, Refused, Slack,
    Transmit, Whom,
};
use rustix::io::Errno;

use crate::own::{invalid, text};

/// `PORTOLAN_PROCESS`
const PROCESS: c_int = -1;
/// `PORTOLAN_THREAD`
const THREAD: c_int = -2;
/// `PORTOLAN_SLACK`
const ALL_SLACK: u64 = u64::MAX;

/// `struct portolan_transmit`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct TransmitWish {
    rate: u64,
    ceiling: u64,
    slice_us: u32,
    period_us: u32,
    burst: u32,
    reserved: u32,
    device: *const c_char,
}

/// `struct portolan_receive`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ReceiveWish {
    bits: u64,
    packets: u32,
    burst_ms: u32,
    priority: u32,
    reserved: u32,
}

/// `struct portolan_cpu`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct CpuWish {
    rate_ppm: u32,
    period_us: u32,
    slack: u32,
    adapt: u32,
    least_ppm: u32,
    most_ppm: u32,
    service_class: *const c_char,
}

/// `struct portolan_group`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct GroupWish {
    device: *const c_char,
    options: u32,
    algorithm: u32,
}

impl TransmitWish {
    /// # Safety
    /// `device` is null or a C string.
    unsafe fn read(self) -> Result<Transmit, Refused> {
        is_zero(self.reserved)?;
        let rate = match (self.rate, self.slice_us, self.period_us) {
            (0, slice_us, period_us) => Rate::Slice {
                slice_us,
                period_us,
            },
            (bits, 0, 0) => Rate::Bits(bits),
            _ => return Err(invalid("a rate, or a slice and a period, not both")),
        };
        let slack = match self.ceiling {
            0 => Slack::None,
            ALL_SLACK => Slack::All,
            bits => Slack::UpTo(bits),
        };
        Ok(Transmit {
            // SAFETY: the caller's promise.
            device: unsafe { text(self.device) }?,
            rate,
            burst: (self.burst != 0).then_some(self.burst),
            slack,
        })
    }
}

impl ReceiveWish {
    fn read(self) -> Result<Receive, Refused> {
        is_zero(self.reserved)?;
        let priority = match self.priority.checked_sub(1).map(u8::try_from) {
            None => None,
            Some(Ok(priority)) => Some(priority),
            Some(Err(_)) => return Err(invalid("priorities are 0 to 7")),
        };
        Ok(Receive {
            packets: (self.packets != 0).then_some(self.packets),
            bits: (self.bits != 0).then_some(self.bits),
            burst_ms: match self.burst_ms {
                0 => Receive::BURST_MS,
                burst_ms => burst_ms,
            },
            priority,
        })
    }
}

impl CpuWish {
    /// # Safety
    /// `service_class` is null or a C string.
    unsafe fn read(self) -> Result<Cpu, Refused> {
        let adapt = match self.adapt {
            0 => Adapt::Off,
            1 => Adapt::Propose,
            2 => Adapt::Auto {
                least_ppm: self.least_ppm,
                most_ppm: self.most_ppm,
            },
            _ => return Err(invalid("no such way to adapt")),
        };
        Ok(Cpu {
            // SAFETY: the caller's promise.
            class: unsafe { text(self.service_class) }?,
            rate_ppm: self.rate_ppm,
            period_us: match self.period_us {
                0 => Cpu::PERIOD_US,
                period_us => period_us,
            },
            slack: self.slack != 0,
            adapt,
        })
    }
}

own! {
    "qos.h", Refused;

    /// `int portolan_transmit_reserve(int, const struct portolan_transmit *)`
    fn portolan_transmit_reserve(whom: c_int, spec: *const TransmitWish) -> c_int {
        // SAFETY: null, or valid by the contract, and its strings too.
        let spec = unsafe { spec.as_ref().ok_or_else(no_spec)?.read()? };
        qos::reserve(meant(whom)?, spec).map(|()| 0)
    }

    /// `int portolan_transmit_release(int)`
    fn portolan_transmit_release(whom: c_int) -> c_int {
        qos::release(meant(whom)?, Kind::Transmit).map(|()| 0)
    }

    /// `int portolan_receive_reserve(int, const struct portolan_receive *)`
    fn portolan_receive_reserve(whom: c_int, spec: *const ReceiveWish) -> c_int {
        // SAFETY: null, or valid by the contract.
        let spec = unsafe { spec.as_ref() }.ok_or_else(no_spec)?.read()?;
        qos::reserve(meant(whom)?, spec).map(|()| 0)
    }

    /// `int portolan_receive_release(int)`
    fn portolan_receive_release(whom: c_int) -> c_int {
        qos::release(meant(whom)?, Kind::Receive).map(|()| 0)
    }

    /// `int portolan_cpu_reserve(int, const struct portolan_cpu *)`
    fn portolan_cpu_reserve(whom: c_int, spec: *const CpuWish) -> c_int {
        // SAFETY: null, or valid by the contract, and its strings too.
        let spec = unsafe { spec.as_ref().ok_or_else(no_spec)?.read()? };
        qos::reserve(meant(whom)?, spec).map(|()| 0)
    }

    /// `int portolan_cpu_release(int)`
    fn portolan_cpu_release(whom: c_int) -> c_int {
        qos::release(meant(whom)?, Kind::Cpu).map(|()| 0)
    }

    /// `int portolan_group_create(uint32_t, uint64_t, const struct portolan_group *, uint32_t)`
    fn portolan_group_create(key: u32, rate: u64, params: *const GroupWish, mode: u32) -> c_int {
        // SAFETY: null, or valid by the contract.
        let (device, options) = match unsafe { params.as_ref() } {
            Some(params) => {
                is_known(params.algorithm)?;
                // SAFETY: as the structure itself.
                (unsafe { text(params.device) }?, options(params.options)?)
            }
            None => (None, GroupOptions::default()),
        };
        let mode = u16::try_from(mode).map_err(|_| invalid("a mode is 0 to 0777"))?;
        MultiplexGroup::create(key, rate, device.as_deref(), options, mode).map(|_| 0)
    }

    /// `int portolan_group_open(uint32_t)`
    fn portolan_group_open(key: u32) -> c_int {
        MultiplexGroup::open(key).map(|_| 0)
    }

    /// `int portolan_group_setoption(uint32_t, uint32_t)`
    fn portolan_group_setoption(key: u32, flags: u32) -> c_int {
        MultiplexGroup::named(key).set_options(options(flags)?).map(|()| 0)
    }

    /// `int portolan_group_setrate(uint32_t, uint64_t)`
    fn portolan_group_setrate(key: u32, rate: u64) -> c_int {
        MultiplexGroup::named(key).set_rate(rate).map(|()| 0)
    }

    /// `int64_t portolan_group_join(uint32_t, int, uint64_t)`
    fn portolan_group_join(key: u32, whom: c_int, rate: u64) -> i64 {
        let Member(number) = MultiplexGroup::named(key).join(meant(whom)?, rate)?;
        Ok(number.into())
    }

    /// `int portolan_group_leave(uint32_t, uint32_t)`
    fn portolan_group_leave(key: u32, member: u32) -> c_int {
        MultiplexGroup::named(key).leave(Member(member)).map(|()| 0)
    }

    /// `int portolan_group_delete(uint32_t)`
    fn portolan_group_delete(key: u32) -> c_int {
        MultiplexGroup::named(key).delete().map(|()| 0)
    }
}

fn meant(whom: c_int) -> Result<Whom, Refused> {
    match whom {
        PROCESS => Ok(Whom::Process),
        THREAD => Ok(Whom::Thread),
        fd if fd >= 0 => Ok(Whom::Socket(fd)),
        _ => Err(invalid(
            "for a descriptor, PORTOLAN_PROCESS or PORTOLAN_THREAD",
        )),
    }
}

fn options(flags: u32) -> Result<GroupOptions, Refused> {
    if flags & !0b111 != 0 {
        return Err(invalid("no such option of a group"));
    }
    Ok(GroupOptions {
        share: flags & 1 != 0,
        slack: flags & 2 != 0,
        keep: flags & 4 != 0,
    })
}

fn is_zero(reserved: u32) -> Result<(), Refused> {
    match reserved {
        0 => Ok(()),
        _ => Err(invalid("what is reserved is to be 0")),
    }
}

/// `alg` of MS Table I: 0 is the only one.
fn is_known(algorithm: u32) -> Result<(), Refused> {
    match algorithm {
        0 => Ok(()),
        other => Err(Refused::new(
            Errno::OPNOTSUPP,
            format!("there is no algorithm {other}; there is 0, by rates"),
        )),
    }
}

fn no_spec() -> Refused {
    Refused::new(Errno::FAULT, "the request is null")
}
