//! The test bed: one namespace with the stack under test, and a link whose far end the runner
//! controls. The bed is the same for both stacks; only the maker of the sockets differs.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use portolan_bench::tools::{MissingTool, Tools};
use portolan_netns::{Daemon, Namespace, Ready};
use portolan_sys::sysctl;

use crate::script::Family;
use crate::wire::Wire;

/// The device of the stack under test.
const DEVICE: &str = "eth0";
const FAR: &str = "far";
const MAC: [u8; 6] = [2, 0, 0, 0, 0x78, 1];
/// The MAC address of no host, so that the far end's kernel ignores the frames.
const FAR_MAC: [u8; 6] = [2, 0, 0, 0, 0x78, 0xfe];

const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const GATEWAY_V4: &str = "10.78.0.2";
const LOCAL_V6: Ipv6Addr = Ipv6Addr::new(0xfd78, 0, 0, 0, 0, 0, 0, 1);
const GATEWAY_V6: &str = "fd78::2";

/// Time limit for the server to answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Settings for both stacks. Scripts can add more.
const SYSCTLS: [(&str, &str); 3] = [
    // Scripts must not affect each other.
    ("net/ipv4/tcp_no_metrics_save", "1"),
    ("net/ipv6/conf/eth0/accept_ra", "0"),
    ("net/ipv6/conf/eth0/router_solicitations", "0"),
];

/// The stack that makes the sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stack {
    Linux,
    Portolan,
}

impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stack::Linux => "linux",
            Stack::Portolan => "portolan",
        })
    }
}

/// The bed of one stack. Dropping it kills all its processes.
pub struct Bed {
    pub stack: Stack,
    pub wire: Wire,
    pub host: Namespace,
    tools: Tools,
    _daemon: Option<Daemon>,
    _far: Namespace,
}

impl Bed {
    /// # Panics
    /// Without root and the programs that `cargo build` makes.
    pub fn new(stack: Stack) -> Bed {
        let tools = Tools::locate().unwrap_or_else(|MissingTool { .. }| {
            panic!("the programs are missing: `cargo build --workspace` makes them")
        });
        let (host, far) = (Namespace::new("host"), Namespace::new("far"));
        join(&host, &far);
        host.enter(|| {
            for (name, value) in SYSCTLS {
                sysctl::write(name, value).expect("root may set kernel parameters");
            }
        });
        let macs =
            std::array::from_fn(|at| MAC.iter().chain(&FAR_MAC).copied().nth(at).unwrap_or(0));
        let wire = Wire::open(&far, FAR, macs).expect("root may open packet sockets");
        let daemon = (stack == Stack::Portolan).then(|| start_daemon(&host, &tools));
        Bed {
            stack,
            wire,
            host,
            tools,
            _daemon: daemon,
            _far: far,
        }
    }

    /// Returns the address of the stack under test.
    pub fn local(family: Family) -> IpAddr {
        match family {
            Family::V4 => LOCAL_V4.into(),
            Family::V6 => LOCAL_V6.into(),
        }
    }

    /// Returns the address of a remote host: a different one for each run of a script, so that runs are independent.
    pub fn remote(family: Family, number: u16) -> IpAddr {
        let [high, low] = number.to_be_bytes();
        match family {
            // The networks of RFC 2544 and of RFC 3849.
            Family::V4 => Ipv4Addr::new(198, 18, high, low).into(),
            Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, number).into(),
        }
    }

    /// Returns the command that starts an agent on the stack under test.
    pub fn agent(&self) -> Command {
        let program = agent_program(&self.tools);
        let mut command = self.host.exec(program);
        if self.stack == Stack::Portolan {
            let preload = self.tools.beside("libportolan_preload.so");
            command
                .env("LD_PRELOAD", preload)
                .env("PORTOLAN", "require");
        }
        command.stderr(Stdio::inherit());
        command
    }
}

fn agent_program(tools: &Tools) -> PathBuf {
    tools.beside("pkt-agent")
}

/// Makes a link without offloads: each packet on it is one packet of the stack.
fn join(host: &Namespace, far: &Namespace) {
    let far_path = far.path();
    host.ip(&format!(
        "link add {DEVICE} address {} type veth peer name {FAR} netns {far_path}",
        mac(MAC)
    ));
    far.enter(|| {
        sysctl::write("net/ipv6/conf/far/disable_ipv6", "1").expect("the kernel has IPv6");
    });
    far.ip("link set far arp off multicast off");
    for (namespace, device) in [(host, DEVICE), (far, FAR)] {
        let words = [
            "-K", device, "tx", "off", "tso", "off", "gso", "off", "gro", "off",
        ];
        let done = namespace.exec("ethtool").args(words).output();
        let done = done.expect("ethtool is installed");
        assert!(done.status.success(), "ethtool: {done:?}");
        namespace.ip(&format!("link set {device} up"));
    }
    host.ip(&format!("addr add {LOCAL_V4}/24 dev {DEVICE}"));
    host.ip(&format!("addr add {LOCAL_V6}/64 dev {DEVICE} nodad"));
    for (family, gateway) in [("-4", GATEWAY_V4), ("-6", GATEWAY_V6)] {
        let mac = mac(FAR_MAC);
        host.ip(&format!(
            "{family} neigh replace {gateway} lladdr {mac} dev {DEVICE} nud permanent"
        ));
        host.ip(&format!(
            "{family} route add default via {gateway} dev {DEVICE}"
        ));
    }
    await_ready(host, DEVICE);
    await_ready(far, FAR);
}

/// Waits until the link is up: the kernel drops packets for some time after it was set up.
fn await_ready(namespace: &Namespace, device: &str) {
    let says = |words: &[&str]| {
        let output = namespace.exec("ip").args(words).output();
        let output = output.expect("iproute2 is installed");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let deadline = Instant::now() + TIMEOUT;
    while !says(&["-o", "link", "show", "dev", device]).contains("state UP")
        || !says(&["-6", "-o", "addr", "show", "dev", device, "tentative"]).is_empty()
    {
        assert!(Instant::now() < deadline, "{device} does not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

fn start_daemon(host: &Namespace, tools: &Tools) -> Daemon {
    let mut command = host.exec(&tools.portoland);
    command.args(["--interface", DEVICE]);
    let mut daemon = Daemon::start(command, Ready::Started);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let status = host.exec(&tools.portolan).arg("status").output();
        if status.is_ok_and(|status| status.status.success()) {
            return daemon;
        }
        assert!(
            Instant::now() < deadline && daemon.is_running(),
            "portoland does not answer:\n{}",
            daemon.output()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
