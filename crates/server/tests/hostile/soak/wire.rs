//! A hostile host on the wire: floods of segments without a connection, rubbish, neighbours that appear and disappear,
//! and segments forged into the victim's connections.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::Duration;

use portolan_netns::{Bed, Namespace};
use portolan_sys::namespace;
use portolan_sys::tap::VNET_HEADER;

use super::attackers::{NICE, RUBBISH_PORT, be_nice};
use super::bystanders::{NGINX, public_programs};
use crate::frames::{Forgery, arp, v4};
use crate::fuzzing::values::Random;
use crate::injection::{Injector, Segment};

/// Rates of each kind of flood, and of single frames.
const FLOOD_RATE: u32 = 2000;
const FRAMES_PER_TICK: usize = 20;
const TICK: Duration = Duration::from_millis(10);

/// Floods for `duration`, with processor time that nobody else wants.
pub(super) struct HostileHost {
    floods: Vec<Child>,
    is_over: Arc<AtomicBool>,
    injector: JoinHandle<u64>,
}

impl HostileHost {
    pub(super) fn start(bed: &Bed, duration: Duration) -> HostileHost {
        // Answers to the floods return there, to nobody.
        bed.a
            .ip(&format!("route replace 198.18.0.0/15 via {}", Bed::B4));
        let floods = ["syn", "syn-ack", "ack"].map(|kind| flood(bed, kind, duration));
        let is_over = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&is_over);
        let host = bed.b.as_fd().try_clone_to_owned().unwrap();
        let macs = [mac(&bed.a), mac(&bed.b)];
        let injector = thread::spawn(move || {
            namespace::enter(&host).expect("root may");
            be_nice();
            inject(macs, &end)
        });
        HostileHost {
            floods: floods.into(),
            is_over,
            injector,
        }
    }

    /// Returns how many frames it sent besides the floods.
    pub(super) fn finish(mut self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        for flood in &mut self.floods {
            // It may have ended.
            let _ = flood.kill();
            flood.wait().unwrap();
        }
        self.injector.join().unwrap()
    }
}

fn flood(bed: &Bed, kind: &str, duration: Duration) -> Child {
    let traffic = public_programs(&bed.a).join("portolan-traffic");
    let target = format!("{}:{}", Bed::A4, NGINX[0]);
    bed.b
        .exec("nice")
        .args(["-n", NICE])
        .arg(traffic)
        .args(["syns", &target, "--segment", kind])
        .args(["--rate", &FLOOD_RATE.to_string()])
        .args(["--seconds", &duration.as_secs().to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn mac(host: &Namespace) -> [u8; 6] {
    let output = host
        .exec("ip")
        .args(["-o", "link", "show", "eth0"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let address = text.split_once("link/ether ").unwrap().1;
    let octets: Vec<u8> = address[..17]
        .split(':')
        .map(|octet| u8::from_str_radix(octet, 16).unwrap())
        .collect();
    octets.try_into().unwrap()
}

/// Sends frames of every kind until the end.
fn inject([victim, own]: [[u8; 6]; 2], is_over: &AtomicBool) -> u64 {
    let injector = Injector::here();
    let mut random = Random(7);
    let mut sent = 0;
    let (a, b) = (v4(Bed::A4), v4(Bed::B4));
    let from_b = |protocol, source_port, destination_port| Forgery {
        source_mac: own,
        destination_mac: victim,
        source: b,
        destination: a,
        protocol,
        source_port,
        destination_port,
        fragment: 0,
        ip_options: false,
        vlan: false,
    };
    while !is_over.load(Ordering::Relaxed) {
        for _ in 0..FRAMES_PER_TICK {
            let port = random.below(1 << 16) as u16;
            let mut frame = match random.below(6) {
                // A new neighbour.
                0 => arp(own, [10, 77, 0, random.below(250) as u8 + 3].into(), a),
                1 => from_b(17, port, RUBBISH_PORT).frame(),
                // Into the connections to redis and nginx, whose sequence numbers it does not know.
                2 => injection(&mut random, own, victim, 6379),
                3 => injection(&mut random, own, victim, NGINX[0]),
                4 => from_b(6, port, random.below(1 << 16) as u16).frame(),
                _ => {
                    let mut rubbish = from_b(6, port, 6379).frame();
                    let at = random.below(rubbish.len());
                    rubbish[at] ^= 1 << random.below(8);
                    rubbish.truncate(rubbish.len() - random.below(20));
                    rubbish
                }
            };
            injector.send(&frame.split_off(VNET_HEADER));
            sent += 1;
        }
        sleep(TICK);
    }
    sent
}

/// RSTs, SYNs, FINs and data with any number, from any port of the peer.
fn injection(random: &mut Random, own: [u8; 6], victim: [u8; 6], port: u16) -> Vec<u8> {
    let forged = Segment {
        from: (
            IpAddr::from(v4(Bed::B4)),
            32_768 + random.below(28_000) as u16,
        )
            .into(),
        to: (Bed::A4, port).into(),
        sequence: random.number() as u32,
        acknowledgement: random.number() as u32,
        flags: [0x04, 0x02, 0x11, 0x18, 0x10, 0x14][random.below(6)],
        timestamps: None,
        payload: b"injected",
    };
    [vec![0; VNET_HEADER], forged.frame(own, victim)].concat()
}
