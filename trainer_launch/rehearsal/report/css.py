"""How the page looks: light, dark, printed, wide and narrow. Pure."""

# Okabe and Ito's colours, told apart with any kind of colour vision, and the ink that is read on each.
ATTEMPTS = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#56b4e9", "#000000"),
    ("#f0e442", "#000000"),
)

_COLOURS = "".join(f".a{number}{{--c:{colour};--i:{ink}}}" for number, (colour, ink) in enumerate(ATTEMPTS))

SHEET = (
    """
:root{color-scheme:light dark;--bg:#fff;--fg:#1a1c1f;--soft:#5b626b;--line:#d9dde2;--card:#f5f6f8;--bad:#a8321d;
--badbg:#fdeeea;--good:#0b6b4d;--goodbg:#e8f6f0;--mark:#b3261e;--still:#b3261e22;--idle:#c3c9d1}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--fg:#e8eaed;--soft:#a3abb5;--line:#353a41;--card:#1f2227;
--bad:#ff9c86;--badbg:#3a1f19;--good:#6fd9b3;--goodbg:#15332a;--mark:#ff8a75;--still:#ff8a7533;--idle:#59616b}}
@media print{:root{color-scheme:light;--bg:#fff;--fg:#000;--soft:#444;--line:#ccc;--card:#f5f6f8;--bad:#a8321d;
--badbg:#fdeeea;--good:#0b6b4d;--goodbg:#e8f6f0;--mark:#b3261e;--still:#b3261e22;--idle:#c3c9d1}
.lane,tr,.broken li,.steps{break-inside:avoid}h2{break-after:avoid}body{padding:0}}
*{box-sizing:border-box;-webkit-print-color-adjust:exact;print-color-adjust:exact}
body{margin:0 auto;padding:24px 28px 40px;max-width:1320px;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:28px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 10px}
header{border-left:6px solid var(--soft);background:var(--card);padding:16px 20px;border-radius:0 8px 8px 0}
header.bad{border-color:var(--bad);background:var(--badbg)}header.bad h1{color:var(--bad)}
header.good{border-color:var(--good);background:var(--goodbg)}header.good h1{color:var(--good)}
header p{margin:6px 0 0;overflow-wrap:anywhere}
.sums{display:flex;flex-wrap:wrap;gap:8px 32px;margin:14px 0 0;padding:0;list-style:none}
.sums b{display:block;font-size:21px;line-height:1.2;font-variant-numeric:tabular-nums}
.sums span{color:var(--soft);font-size:13px}
.broken{margin:0;padding:0;list-style:none}
.broken li{margin:0 0 12px;padding-left:14px;border-left:3px solid var(--bad);overflow-wrap:anywhere}
.broken b{color:var(--bad)}
.broken .mend{color:var(--fg);display:block;margin-top:3px}
.note{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 12px;padding:0;list-style:none;font-size:13px;
color:var(--soft)}
.legend i{display:inline-block;width:26px;height:12px;margin-right:6px;vertical-align:-1px;border-radius:2px}
.legend i.fault{width:17px;height:17px;line-height:17px;border-radius:9px;vertical-align:-3px}
.legend i.band{background:var(--still);height:15px}.legend i.dashes{height:0;border-top:2px dashed var(--mark);
border-radius:0;vertical-align:4px}
.chart{--label:calc(min(var(--chars),24) * 7.4px + 12px)}
.row{display:grid;grid-template-columns:var(--label) minmax(0,1fr);align-items:center}
.name{font:12px/1 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;padding-right:10px;text-align:right;
overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.track{position:relative;height:22px;background-size:100% 100%;border-radius:2px}
.lane{margin:3px 0}.track.all{height:100%}
.many .track{height:14px}.many .lane{margin:1px 0}
.s{position:absolute;top:0;bottom:0;min-width:1px;overflow:hidden;white-space:nowrap;text-align:center;
font:600 11px/22px system-ui,"DejaVu Sans",sans-serif;color:var(--i);border-radius:2px}
.many .s{line-height:14px;font-size:10px}
.running{background:var(--c);box-shadow:inset 0 0 0 .5px #0006}
.stopping{background:repeating-linear-gradient(135deg,var(--c) 0 4px,#fff 4px 7px);color:transparent}
.init{background:repeating-linear-gradient(90deg,var(--soft) 0 2px,var(--card) 2px 5px)}
.waiting{background:var(--card);box-shadow:inset 0 0 0 1px var(--idle)}
.down{background:linear-gradient(var(--mark),var(--mark)) center/100% 2px no-repeat}
.hit{position:absolute;top:-3px;bottom:-3px;width:3px;margin-left:-1.5px;background:var(--fg);
box-shadow:0 0 0 1px var(--bg);z-index:2}
.lasts{position:absolute;bottom:-3px;height:4px;min-width:3px;background:var(--fg);box-shadow:0 0 0 1px var(--bg);
z-index:2}
.marks{position:relative}
.fault{display:inline-block;width:19px;height:19px;border-radius:10px;background:var(--fg);color:var(--bg);
font:700 11px/19px system-ui,"DejaVu Sans",sans-serif;text-align:center;font-style:normal}
.marks .fault{position:absolute;margin-left:-9.5px;z-index:3}
.marks .wide{width:27px;margin-left:-13.5px}
.said{position:absolute;font-size:12.5px;line-height:19px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;
z-index:3}
.lines{position:absolute;inset:0;pointer-events:none}
.lines span{position:absolute;top:0;bottom:0;border-left:1px dashed var(--soft);opacity:.45}
.plot{position:relative}
.steps{margin-top:12px}
.steps .track{height:150px;border-left:1px solid var(--line);border-bottom:1px solid var(--line);border-radius:0}
.steps svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.steps polyline{fill:none;stroke:var(--c);stroke-width:2.5;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.steps .one{position:absolute;width:7px;height:7px;margin:-3.5px;border-radius:4px;background:var(--c)}
.steps .back{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:3 3;vector-effect:non-scaling-stroke}
.steps .still{position:absolute;top:0;bottom:0;background:var(--still);min-width:1px}
.steps .grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
.scale{position:relative;align-self:stretch;font-size:12px;color:var(--soft);font-variant-numeric:tabular-nums}
.scale span{position:absolute;right:8px;transform:translateY(-50%)}
.steps .of{position:absolute;left:8px;top:4px;font-size:12px;font-weight:600;color:var(--soft)}
.axis{position:relative;height:20px;font-size:12px;color:var(--soft);font-variant-numeric:tabular-nums}
.axis span{position:absolute;top:4px;transform:translateX(-50%);white-space:nowrap}
.axis span:first-child{transform:none}.axis span.last{transform:translateX(-100%)}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;color:var(--soft);font-weight:600;border-bottom:1px solid var(--line);padding:4px 12px 4px 0}
td{border-bottom:1px solid var(--line);padding:5px 12px 5px 0;vertical-align:top;overflow-wrap:anywhere}
td.n,th.n{font-variant-numeric:tabular-nums;white-space:nowrap}
td.t{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:12.5px}
footer{margin-top:30px;color:var(--soft);font-size:12.5px}
@media(max-width:640px){body{padding:14px 14px 30px;font-size:14.5px}h1{font-size:22px}header{padding:12px 14px}
.sums{display:grid;grid-template-columns:1fr 1fr 1fr;gap:10px 12px}.sums b{font-size:18px}
.chart{--label:calc(min(var(--chars),9) * 6.8px + 8px)}.name{font-size:11px;padding-right:6px}
.said{font-size:11.5px}.axis .odd{display:none}
table,tbody,tr{display:block}thead{display:none}
tr{border-bottom:1px solid var(--line);padding:7px 0}
td{border:0;padding:1px 0;display:grid;grid-template-columns:98px minmax(0,1fr);column-gap:6px;white-space:normal}
td::before{content:attr(data-of);color:var(--soft);font:600 12.5px/1.5 system-ui,"DejaVu Sans",sans-serif}}
"""
    + _COLOURS
).strip()
