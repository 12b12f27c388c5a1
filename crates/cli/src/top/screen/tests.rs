use ratatui::backend::TestBackend;
use ratatui::crossterm::event::KeyCode;
use ratatui::{Terminal, style};

use super::*;
use crate::json::HolderView;
use crate::top::sheet::Arrangement;
use crate::top::view::{GuaranteeRow, LinkRow, ProcessRow, SessionRow, Traffic, UserRow, View};

fn process(pid: u32, program: &str, in_bits: f64, drops: f64) -> ProcessRow {
    ProcessRow {
        pid,
        program: program.into(),
        sessions: 3,
        traffic: Traffic {
            in_bits,
            out_bits: 2e6,
        },
        drops,
        cpu: 0.25,
    }
}

fn session(port: u16, retransmits: f64) -> SessionRow {
    SessionRow {
        protocol: "tcp",
        local: ([10, 0, 0, 1], port).into(),
        remote: Some(([10, 0, 0, 2], 40000).into()),
        holder: HolderView::Process {
            pid: 7,
            program: "redis-server".into(),
        },
        traffic: Traffic {
            in_bits: 1e6,
            out_bits: 2e6,
        },
        in_packets: 100.0,
        out_packets: 200.0,
        retransmits,
        cpu: 0.01,
        receive_queue: 0,
        send_queue: 1448,
    }
}

fn guarantee(scope: &str, used: f64) -> GuaranteeRow {
    GuaranteeRow {
        kind: "transmit",
        scope: scope.into(),
        unit: "bit/s",
        granted: 20e6,
        used,
        drops: 0.0,
    }
}

fn view() -> View {
    View {
        seconds: 1.0,
        traffic: Traffic {
            in_bits: 40e6,
            out_bits: 4e6,
        },
        drops: 2.0,
        server_cpu: 0.015,
        sessions: (0..30).map(|n| session(6379 + n, 0.0)).collect(),
        processes: vec![
            process(4711, "redis-server", 39e6, 0.0),
            process(12, "nginx", 1e6, 2.0),
        ],
        users: vec![UserRow {
            uid: 33,
            user: Some("www-data".into()),
            processes: 2,
            sessions: 6,
            traffic: Traffic {
                in_bits: 40e6,
                out_bits: 4e6,
            },
            drops: 2.0,
            cpu: 0.5,
        }],
        links: vec![LinkRow {
            device: "eth0".into(),
            is_present: true,
            traffic: Traffic {
                in_bits: 40e6,
                out_bits: 50e6,
            },
            rate: 100e6,
            reserved: 20e6,
            drops: 0.0,
        }],
        guarantees: vec![guarantee("pid 4711", 10e6), guarantee("port udp:53", 20e6)],
    }
}

fn app() -> App {
    let mut app = App::new(Tab::Processes, &Arrangement::default());
    app.show(view());
    app
}

fn press(app: &mut App, keys: &str) {
    for key in keys.chars() {
        app.on_key(KeyCode::Char(key).into());
    }
}

fn drawn(app: &mut App, width: u16, height: u16, palette: Palette) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, app, palette)).unwrap();
    terminal.backend().buffer().clone()
}

/// Returns the lines of the screen, without spaces at their ends and without empty lines before the last.
fn lines(app: &mut App, width: u16, height: u16) -> Vec<String> {
    let buffer = drawn(app, width, height, Palette::Coloured);
    let cells = buffer.content().chunks(usize::from(width));
    let lines = cells.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
    lines
        .map(|line| line.trim_end().to_owned())
        .filter(|line| !line.is_empty())
        .collect()
}

#[test]
fn eighty_columns_show_all_of_a_process() {
    assert_eq!(
        lines(&mut app(), 80, 24),
        [
            "30 sessions, 2 processes, in 40 Mbit/s, out 4 Mbit/s, 2 drops/s, server 1.5% CPU",
            " 1 Processes  2 Sessions  3 Users  4 Links  5 Guarantees",
            " PID Program       Sessions  In bit/s  Out bit/s  Drops/s   CPU",
            "4711 redis-server         3      39 M        2 M        0 25.0%",
            "  12 nginx                3       1 M        2 M        2 25.0%",
            "q quit  h help  / filter  < > sort  r reverse  p pause",
        ]
    );
}

#[test]
fn forty_columns_keep_names_and_rates() {
    assert_eq!(
        lines(&mut app(), 40, 12),
        [
            "30 sessions, 2 processes, in 40 Mbit/s",
            "out 4 Mbit/s, 2 drops/s, server 1.5% CPU",
            " 1 Proc  2 Sess  3 User  4 Link  5 Guar",
            "Program       In bit/s  Out bit/s   CPU",
            "redis-server      39 M        2 M 25.0%",
            "nginx              1 M        2 M 25.0%",
            "q quit  h help  / filter  < > sort  r re",
        ]
    );
}

#[test]
fn wide_screens_show_sessions_in_full() {
    let mut app = app();
    press(&mut app, "2");
    assert_eq!(
        lines(&mut app, 200, 6),
        [
            "30 sessions, 2 processes, in 40 Mbit/s, out 4 Mbit/s, 2 drops/s, server 1.5% CPU",
            " 1 Processes  2 Sessions  3 Users  4 Links  5 Guarantees",
            "Netid  Local         Peer           Holder          In bit/s  Out bit/s  Recv-Q  Send-Q  Retrans/s  CPU",
            "tcp    10.0.0.1:6379 10.0.0.2:40000 7,redis-server       1 M        2 M       0    1448          0 1.0%",
            "tcp    10.0.0.1:6380 10.0.0.2:40000 7,redis-server       1 M        2 M       0    1448          0 1.0%",
            "q quit  h help  / filter  < > sort  r reverse  p pause",
        ]
    );
}

#[test]
fn guarantees_and_links_are_bars() {
    let mut app = app();
    press(&mut app, "5");
    assert_eq!(
        lines(&mut app, 80, 10)[3..5],
        [
            "transmit   pid 4711        20 M  10 M bit/s        0 [|||||||||||||         50%]",
            "transmit   port udp:53     20 M  20 M bit/s        0 [|||||||||||||||||||||100%]",
        ]
    );
    press(&mut app, "4");
    assert_eq!(
        lines(&mut app, 80, 10)[3],
        "eth0       40 M       50 M 100 M      20 M        0 [|||||||||||||          50%]"
    );
}

#[test]
fn rows_scroll_and_the_order_is_marked() {
    let mut app = app();
    press(&mut app, "2jj");
    let screen = lines(&mut app, 100, 10);
    assert!(screen[3].contains("10.0.0.1:6381"), "{screen:#?}");
    press(&mut app, ">>r");
    let screen = lines(&mut app, 100, 10);
    assert!(screen[2].contains("Local^"), "{screen:#?}");
    press(&mut app, "g");
    let screen = lines(&mut app, 100, 10);
    assert!(screen[3].contains("10.0.0.1:6408"), "{screen:#?}");
}

#[test]
fn a_filter_and_a_pause_show_below() {
    let mut app = app();
    press(&mut app, "/nginx");
    let screen = lines(&mut app, 80, 10);
    assert_eq!(screen.len(), 5, "{screen:#?}");
    assert!(screen[4].starts_with("filter: nginx_"), "{screen:#?}");
    app.on_key(KeyCode::Enter.into());
    press(&mut app, "p");
    app.show(View {
        traffic: Traffic {
            in_bits: 77e6,
            ..view().traffic
        },
        ..view()
    });
    let screen = lines(&mut app, 80, 10);
    assert!(screen[0].contains("in 40 Mbit/s"), "{screen:#?}");
    assert!(
        screen[4].starts_with("filter: nginx  PAUSED"),
        "{screen:#?}"
    );
}

#[test]
fn a_silent_server_is_reported_above_the_last_figures() {
    let mut app = app();
    app.error = Some("/run/x: no server listens".into());
    let screen = lines(&mut app, 80, 10);
    assert_eq!(screen[0], "/run/x: no server listens");
    assert!(screen[3].contains("redis-server"), "{screen:#?}");
}

#[test]
fn help_is_whole_on_a_narrow_screen() {
    let mut app = app();
    press(&mut app, "h");
    let screen = lines(&mut app, 40, 24);
    assert_eq!(screen.last().unwrap(), "Any key leaves this help.");
}

/// Returns the colours of the foreground that the screen has.
fn colours(app: &mut App, palette: Palette) -> Vec<style::Color> {
    let buffer = drawn(app, 80, 10, palette);
    let mut colours: Vec<_> = buffer.content().iter().map(|cell| cell.fg).collect();
    colours.dedup();
    colours.retain(|&colour| colour != Color::Reset);
    colours
}

#[test]
fn colours_are_for_what_needs_attention() {
    let mut app = app();
    assert_eq!(colours(&mut app, Palette::Coloured), [Color::Red]);
    press(&mut app, "5");
    let bars = colours(&mut app, Palette::Coloured);
    assert_eq!(bars, [Color::Green, Color::Red]);
    assert_eq!(colours(&mut app, Palette::Plain), []);
}

#[test]
fn no_size_of_a_screen_makes_it_panic() {
    let mut app = app();
    for width in (0..60).chain([200]) {
        for height in 0..14 {
            for keys in ["1", "2", "3", "4", "5", "h"] {
                press(&mut app, keys);
                drawn(&mut app, width, height, Palette::Coloured);
                press(&mut app, "1");
            }
        }
    }
}

#[test]
fn names_of_any_script_are_cut_by_their_width() {
    let mut app = App::new(Tab::Processes, &Arrangement::default());
    app.show(View {
        processes: vec![process(1, "漢字漢字漢字漢字漢字漢字", 0.0, 0.0)],
        ..view()
    });
    for width in 20..60 {
        drawn(&mut app, width, 8, Palette::Coloured);
    }
    let screen = lines(&mut app, 36, 8);
    assert!(screen.iter().any(|line| line.contains('+')), "{screen:#?}");
}
